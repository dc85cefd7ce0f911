"""Jobs: functions and commands of which one instance runs at a time."""
