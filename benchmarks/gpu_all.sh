#!/bin/sh
# Builds, tests, tunes and measures on the GPU of this machine:  benchmarks/gpu_all.sh RESULTS_DIR
#
# STEPS="scan ops" runs only those; each has a time limit and none stops the others:
#   build     the library, unless ONNXFUSE_LIBRARY names one
#   models    in the background, what `tune` and `llama` need;  cache  likewise, Inductor's programs for `ops`
#   variants  every kernel variant once;  tests  the GPU tests
#   scan      plans for the benchmark's shapes, into plans.json, which the later steps use if it is there
#   ops       the op benchmark and its verdict (OPS_SECONDS, OPS_OPTIONS)
#   tune      `onnxfuse tune` on a 4-layer Llama;  llama  that model, and without one fusion at a time (LLAMA_OPTIONS)
#   memcheck, initcheck, synccheck, racecheck  NVIDIA's checkers; not part of a run of all steps
# What a step prints goes to session.log, the end of it to the terminal. COMMIT is recorded where git is not at hand.
# Needs PyTorch and ONNX Runtime's CUDA wheel, and to build nvcc, CMake and ninja.
results=$(mkdir -p "${1:?usage: gpu_all.sh RESULTS_DIR}" && cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
build=${BUILD_DIR:-/tmp/onnxfuse-build}
steps=" ${STEPS:-build models cache variants tests scan ops tune llama} "
commit="--commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PYTHONPATH"

wanted() { case "$steps" in *" $1 "*) return 0 ;; *) return 1 ;; esac }
finish() {  # NAME CODE START LOG: keeps the log, shows its end
  echo "== $1: exit $2, $(($(date +%s) - $3)) s" | tee -a "$results/session.log"
  cat "$4" >> "$results/session.log"
  tail -n "${LINES_SHOWN:-12}" "$4" | cut -c1-200
}
background() {  # LIMIT NAME COMMAND...: begins a step; `await NAME` ends it
  wanted "$2" || return 0
  limit=$1 name=$2
  shift 2
  eval "start_$name=$(date +%s)"
  timeout -k 5 "$limit" "$@" > "$build.$name.log" 2>&1 &
  eval "job_$name=$!"
}
await() {
  wanted "$1" || return 0
  eval "wait \$job_$1"
  code=$?
  eval "finish $1 $code \$start_$1 '$build.$1.log'"
}
step() {  # LIMIT NAME COMMAND...
  limit=$1 name=$2 start=$(date +%s) log="$build.$2.log"
  shift 2
  wanted "$name" || return 0
  timeout -k 5 "$limit" "$@" > "$log" 2>&1
  code=$?
  finish "$name" $code "$start" "$log"
  return $code
}

if [ -z "$ONNXFUSE_LIBRARY" ]; then
  step 150 build sh -c "cmake -S custom_ops -B $build -G Ninja -DONNXFUSE_CUDA=ON && ninja -C $build" || exit 1
  export ONNXFUSE_LIBRARY="$build/libonnxfuse_ops.so"
fi
work=${LLAMA_WORK:-/tmp/bench_llama}
llama="python3 benchmarks/bench_llama.py --work $work --ablate $commit $LLAMA_OPTIONS"
ops="python3 benchmarks/bench_op.py $OPS_OPTIONS"
background 150 models $llama --prepare
background 100 cache $ops --compile-cache "${COMPILE_PROCESSES:-8}" --deadline "${CACHE_SECONDS:-70}"
step 60 variants python3 tests/cuda/sanitize.py
step 240 tests python3 -m pytest tests/cuda --confcutdir=tests/cuda -q
await models  # nothing may run beside what is timed
await cache
plans="$results/plans.json"
LINES_SHOWN=20 step $((${SCAN_SECONDS:-150} + 30)) scan $ops --suite norm-linear activation swiglu decode layer-norm llama \
  --scan "$plans" --scan-only --scan-seconds "${SCAN_SECONDS:-150}"
tuned=""
[ -f "$plans" ] && tuned="--tuned $plans"
LINES_SHOWN=32 step $((${OPS_SECONDS:-210} + 30)) ops $ops --peers torch --deadline "${OPS_SECONDS:-210}" $tuned $commit \
  --results "$results/op_h200.csv"
for name in llama tune_h200; do  # these are continued, the ops are measured anew
  [ -f "benchmarks/results/$name.csv" ] && [ ! -f "$results/$name.csv" ] && cp "benchmarks/results/$name.csv" "$results/"
done
LINES_SHOWN=8 step 300 tune python3 benchmarks/tune_model.py "$work/onnxfuse.onnx" -o "$results/tuning.json" $commit \
  --results "$results/tune_h200.csv"
[ -f "$plans" ] && export ONNXFUSE_TUNING="$plans"
LINES_SHOWN=40 step 200 llama $llama --reuse --results "$results/llama.csv"
unset ONNXFUSE_TUNING
for tool in memcheck initcheck synccheck; do
  step 90 $tool compute-sanitizer --tool $tool --error-exitcode 3 python3 tests/cuda/sanitize.py --small
done
step 500 racecheck sh -c 'seq 1 6 | xargs -P 6 -I{} compute-sanitizer --tool racecheck --error-exitcode 3 \
  python3 tests/cuda/sanitize.py --small --without-stream-sums --part {}/6'
