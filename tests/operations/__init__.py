"""What operators use: the admin, the command, the doctor, system checks, views."""
