"""What would stop a run, found before anything is started."""
