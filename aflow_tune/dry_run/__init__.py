"""A dry run's words and numbers: what the scripted policy says, what came of it, how it is shown.

Nothing here plays a run: that is `engines/trinity/preflight/dry_run.py`.
"""
