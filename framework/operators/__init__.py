"""The arithmetic of operators over event time: pure functions and values, which know no engine, no
state and no clock."""
