#!/usr/bin/env bash
# The measurements of benchmarks/gpu.py in commands of at most ten minutes, for a GPU that is lent
# for less than an hour. In this order; stop where `smoke` finds a wrong result:
#
#   bash benchmarks/gpu_run.sh smoke       checks, then small ones under compute-sanitizer: 4 minutes
#   bash benchmarks/gpu_run.sh kernels     rates of the chip and all configurations: 9 minutes
#   bash benchmarks/gpu_run.sh layers      steps, updates, growth, memory, a profile: 9
#   bash benchmarks/gpu_run.sh grid        the choice at other sizes, with the new tables: 9
#   bash benchmarks/gpu_run.sh model       one whole model beside compiled dense: 9
#   bash benchmarks/gpu_run.sh training    500 steps of it with RigL, dense and masked: 9
#
# Results go to $OUT, the current folder without it: STEP.json, STEP.log, and the compiled kernels
# as kernels.tgz. Put that into build/ before the next step, which then compiles only what is new.
# Further arguments go to gpu.py: --dry, or --tokens train.bin.
set -u
cd "$(dirname "$0")/.."
step=${1:?expected smoke, kernels, layers, grid, model or training}
shift
out=${OUT:-.}
python=${PYTHON:-python3}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)} PYTHONUNBUFFERED=1
mkdir -p "$TRITON_CACHE_DIR"
if [ -f build/kernels.tgz ]; then tar xzf build/kernels.tgz -C "$TRITON_CACHE_DIR"; fi

measure() {  # seconds, and arguments of gpu.py
    timeout "$1" "$python" benchmarks/gpu.py "${@:2}" --out "$out/$step.json" 2>&1 | tee "$out/$step.log"
    return "${PIPESTATUS[0]}"
}

case $step in
smoke)
    nvidia-smi || true
    command -v gcc compute-sanitizer ncu || true
    measure 150 --smoke --limit 120 "$@"
    status=$?
    if command -v compute-sanitizer >/dev/null; then
        timeout 200 compute-sanitizer --target-processes all "$python" benchmarks/gpu.py --smoke --small \
            --limit 180 --out "$out/sanitizer.json" 2>&1 | tail -n 100 | tee "$out/sanitizer.log"
    fi
    ;;
kernels)
    measure 560 ceilings "kernels 64" "kernels 128" "kernels 32" "kernels 16" --limit 108 "$@"
    status=$?
    ;;
layers)
    measure 480 steps updates growth memory "dense way" --limit 92 "$@"
    status=$?
    if command -v ncu >/dev/null; then
        timeout 70 ncu --clock-control none --set full -k regex:rows_kernel -c 3 --kill yes \
            -o "$out/rows" "$python" benchmarks/gpu.py steps --child --out "$out/profiled.json"
    fi
    ;;
grid | model | training)
    measure 560 "$step" --limit 540 "$@"
    status=$?
    ;;
*)
    echo "gpu_run.sh: expected smoke, kernels, layers, grid, model or training, got $step"
    exit 2
    ;;
esac
tar czf "$out/kernels.tgz" -C "$TRITON_CACHE_DIR" .
exit "$status"
