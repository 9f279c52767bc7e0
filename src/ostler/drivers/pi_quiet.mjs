// Loaded into pi by `--import`. With every word of its model pi writes all that was said so far, twice, and at the end
// of each turn and of the run all messages once more; a long file would come to hundreds of megabytes. What is left
// out here is said by the lines that stay.
const REPEATS = ['{"type":"message_update"', '{"type":"tool_execution_update"'];
const ENDS = ["turn_end", "agent_end"];
const write = process.stdout.write.bind(process.stdout);

function shortened(text) {
  if (REPEATS.some((start) => text.startsWith(start))) return "";
  const end = ENDS.find((type) => text.startsWith(`{"type":"${type}",`));
  return end === undefined ? text : `{"type":"${end}"}\n`;
}

process.stdout.write = (chunk, ...rest) => write(typeof chunk === "string" ? shortened(chunk) : chunk, ...rest);

// Programs that pi starts are none of our business.
const own = `--import=${import.meta.url}`;
const others = (process.env.NODE_OPTIONS ?? "").replace(own, "").trim();
if (others) process.env.NODE_OPTIONS = others;
else delete process.env.NODE_OPTIONS;
