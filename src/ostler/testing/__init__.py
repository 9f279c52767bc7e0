"""What tests of users need: a clock driven by hand, a PostgreSQL server, the suite of the isolation contract."""
