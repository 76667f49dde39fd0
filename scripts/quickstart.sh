#!/usr/bin/env bash
# Makes .venv and trains: a small language model, a workflow of two calls, measured before and
# after. What follows the command goes to `aflow-tune configs/quickstart.yaml` (seed=1, --inline).
. "$(dirname "$0")/setup.sh"
exec .venv/bin/aflow-tune configs/quickstart.yaml "$@"
