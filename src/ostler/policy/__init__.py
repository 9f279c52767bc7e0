"""What should happen: pure functions of facts and the time. They decide; other packages act."""
