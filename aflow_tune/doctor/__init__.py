"""`aflow-tune doctor`: checks of a machine and a configuration before a run is started."""
