#!/usr/bin/env bash
# Makes .venv and passes the tests, without what is marked slow; what follows the command goes to
# pytest instead of that. Programs that a model wrote run behind bubblewrap: Debian's, if missing.
. "$(dirname "$0")/setup.sh"
if ! command -v bwrap >/dev/null; then
    sudo="$(command -v sudo || true)"
    $sudo apt-get update -qq && $sudo apt-get install -qqy bubblewrap >/dev/null
fi
[ $# -gt 0 ] || set -- -m 'not slow'
exec .venv/bin/pytest -n 2 --dist loadfile "$@"
