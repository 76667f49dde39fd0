"""The command of a submitted job: `python -m aflow_tune.commands.run_submitted`.

Internal: `aflow-tune submit` creates the job that calls it.
"""

from __future__ import annotations

import sys
import traceback

from aflow_tune.errors import AflowTuneError, ExitCode


def main() -> int:
    """Run the submitted configuration; prints (for `submit --follow`) and returns the exit code."""
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.cluster.jobs import ENDED, open_payload
    from aflow_tune.tuning import run_loaded

    code = int(ExitCode.FAILED)
    try:
        config, functions = open_payload()
        run_loaded(config, *functions)
        code = int(ExitCode.DONE)
    except AflowTuneError as error:
        print(f"\naflow-tune: {error}", file=sys.stderr, flush=True)
        code = int(error.exit_code)
    except KeyboardInterrupt:
        print("\naflow-tune: stopped at once; what was saved before is kept.", file=sys.stderr)
    except Exception:  # a defect: print before the line at which the client stops reading
        traceback.print_exc()
    sys.stderr.flush()
    print(f"{ENDED}{code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
