#!/usr/bin/env bash
# Install the real SGLang server, for tests on a CPU, into <checkout>/.cache/sglang-venv (1.7 GB, two to five minutes).
#
# Only what SGLang's CPU path imports is installed; sgl_kernel, triton and torchvision are answered by stand_ins/.
# Run it again at will: a stamp over the two lists makes it a no-op.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$(cd "$here/../.." && pwd)/.cache/sglang-venv"
stamp="$venv/.installed"
wanted="$(cat "$here/requirements.txt" "$here/requirements-no-deps.txt" | cksum)"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  exit 0
fi

rm -f "$stamp"
[[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet -r "$here/requirements.txt"
"$venv/bin/pip" install --quiet --no-deps -r "$here/requirements-no-deps.txt"
echo "$wanted" > "$stamp"
