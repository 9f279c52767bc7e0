DROP TABLE simulation_wholes;
DROP TABLE simulation_turns;
DROP TABLE simulation_runs;
