#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests the gateway with NVIDIA's own programs, tritonclient (HTTP, gRPC, asyncio,
# system shared memory) and perf_analyzer, and with OpenAI's client. Installed once, into build/interop.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD/build/interop
mkdir -p "$root"
again=$PWD/hack/again.sh

# tritonclient, the newest for this Python.
want="tritonclient[all]==2.73.0 pytest==9.1.1 kubernetes-validate==1.37.0 pyyaml==6.0.3 openai==3.51.0"
if [ "$(cat "$root/installed" 2>/dev/null)" != "$want" ]; then
  # shellcheck disable=SC2086
  hack/venv.sh "$root/venv" $want
  echo "$want" > "$root/installed"
fi

# perf_analyzer comes in an older wheel of the same package. It needs the CUDA
# runtime and libb64, even if it uses neither.
perf() {
  mkdir -p "$root/perf" "$root/wheels"
  local download=("$again" "$root/venv/bin/pip" download -q --disable-pip-version-check --no-deps -d "$root/wheels")
  "${download[@]}" --only-binary=:all: --platform manylinux1_x86_64 tritonclient==2.51.0 || return 1
  "${download[@]}" nvidia-cuda-runtime-cu12==12.9.79 || return 1
  "$root/venv/bin/python" - "$root" <<'PY' || return 1
import pathlib, sys, zipfile
root = pathlib.Path(sys.argv[1])
for wheel in (root / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if name.endswith(("/bin/perf_analyzer", "/libcudart.so.12")):
                (root / "perf" / pathlib.Path(name).name).write_bytes(z.read(name))
PY
  chmod +x "$root/perf/perf_analyzer"
  if ! ldconfig -p | grep libb64.so.0d >/dev/null; then # not -q, which would close ldconfig's pipe
    (
      cd "$root/wheels" || exit
      apt-get download -qq libb64-0d || { "$again" apt-get update -qq && "$again" apt-get download -qq libb64-0d; }
    ) 2>/dev/null || return 1
    dpkg -x "$root"/wheels/libb64-0d_*.deb "$root/wheels/libb64" || return 1
    cp "$root"/wheels/libb64/usr/lib/*/libb64.so.0d "$root/perf/" || return 1
  fi
  LD_LIBRARY_PATH=$root/perf "$root/perf/perf_analyzer" --version >/dev/null 2>&1 || return 1
}
if [ ! -e "$root/perf/works" ]; then
  if perf; then touch "$root/perf/works"; else echo "perf_analyzer cannot be installed here: its tests are SKIPPED"; fi
fi

mkdir -p bin
go build -o bin/ringbatch ./cmd/ringbatch
go build -o build/interop/sum ./gateway/interop/sum
exec "$root/venv/bin/python" -m pytest -q -ra -p no:cacheprovider gateway/interop "$@"
