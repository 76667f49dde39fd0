# The environment of this clone: .venv with the package, editable, and what its tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/pip ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet -c constraints.txt -e '.[test]'
