#!/bin/sh
# Builds, tests, tunes and measures on the GPU of this machine:  benchmarks/gpu_all.sh RESULTS_DIR
# Each step has a time limit and none stops the others; STEPS="variants tune llama" runs only those. Needs nvcc, CMake, ninja, PyTorch and ONNX Runtime's CUDA wheel.
results=$(mkdir -p "${1:?usage: gpu_all.sh RESULTS_DIR}" && cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
build=${BUILD_DIR:-/tmp/onnxfuse-build}
step() {
  limit=$1 name=$2 start=$(date +%s)
  shift 2
  case " build ${STEPS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
  timeout "$limit" "$@" > "$build.log" 2>&1
  code=$?
  echo "== $name: exit $code, $(($(date +%s) - start)) s" | tee -a "$results/session.log"
  cat "$build.log" >> "$results/session.log"
  tail -n "${LINES_SHOWN:-12}" "$build.log" | cut -c1-220
  return $code
}

step 120 build sh -c "cmake -S custom_ops -B $build -G Ninja -DONNXFUSE_CUDA=ON && ninja -C $build" || exit 1
export ONNXFUSE_LIBRARY="$build/libonnxfuse_ops.so" PYTHONPATH="$PWD:$PYTHONPATH"
skip=""
step 40 variants python3 tests/cuda/sanitize.py || skip="--skip tile9 tile10 tile11 tile12 tile13"
step 90 tests python3 -m pytest tests/cuda --confcutdir=tests/cuda -q
LINES_SHOWN=40 step 80 tune python3 benchmarks/tune_shapes.py --suite ${TUNE_SUITES:-llama swiglu layer-norm} -o "$results/tuning.json" $skip
export ONNXFUSE_TUNING="$results/tuning.json"
LINES_SHOWN=60 step "${LLAMA_SECONDS:-220}" llama python3 benchmarks/bench_llama.py --results "$results/llama.csv" $LLAMA_OPTIONS
ops="python3 benchmarks/bench_op.py --results $results/ops.csv --commit ${COMMIT:-unknown}"
LINES_SHOWN=60 step 80 ops $ops --no-compile --suite swiglu decode activation layer-norm
LINES_SHOWN=40 step 90 norm-linear $ops --suite norm-linear  # with torch.compile: seconds a shape
step 60 memcheck compute-sanitizer --tool memcheck --error-exitcode 3 python3 tests/cuda/sanitize.py
step 60 racecheck compute-sanitizer --tool racecheck --error-exitcode 3 python3 tests/cuda/sanitize.py
