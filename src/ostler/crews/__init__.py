"""Many agents: a supervisor keeps the members of crews at work, replaces them, and stops them in order."""
