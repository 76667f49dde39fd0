"""Sweeps: the same configuration tried with other settings, one run folder a trial.

A sweep is a folder beside the runs, with Optuna's study and a run folder for each trial, so that
whatever works on runs works on trials. Optuna draws the settings and decides what is pruned; what
a trial is, how it is started, stopped, resumed and scored is ours. A run knows nothing of sweeps.
"""

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "halving")
OBJECTIVES = ("best", "last")
STUDY_FILE = "study.sqlite"
