"""From settings as written to settings as run: filled in, refused with a cure, validated."""
