"""Process life: options, logs, tasks, signals, exit codes, the admin port."""
