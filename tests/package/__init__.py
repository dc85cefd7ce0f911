"""The package as a project has it: its public names, its wheel, its documents, its test kit."""
