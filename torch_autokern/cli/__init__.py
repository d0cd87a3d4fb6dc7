"""The command `autokern`: one file a group of commands, and the only place that prints."""
