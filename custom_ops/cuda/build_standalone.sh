#!/bin/sh
# Builds the kernels without ORT, for the tuner and the benchmarks:  build_standalone.sh OUTPUT.so [jobs]
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build_standalone.sh OUTPUT.so [jobs]}
jobs=${2:-$(nproc)}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
flags="-O3 -std=c++17 -DNDEBUG -DONNXFUSE_HOPPER --expt-relaxed-constexpr -lineinfo -Xcompiler -fPIC,-fvisibility=default"
hopper="-gencode=arch=compute_90a,code=sm_90a"
{
  for unit in wgmma_stream wgmma_tile; do
    echo "nvcc $flags $hopper -c $here/$unit.cu -o $objects/${unit}_f16.o"
    echo "nvcc $flags $hopper -DONNXFUSE_BFLOAT16 -c $here/$unit.cu -o $objects/${unit}_bf16.o"
  done
  for unit in hopper_launch row_stats generic; do echo "nvcc $flags $hopper -c $here/$unit.cu -o $objects/$unit.o"; done
  for unit in tensor_map execute status choose tuning_table c_api; do echo "nvcc $flags -x cu $hopper -c $here/$unit.cc -o $objects/$unit.o"; done
} | xargs -P "$jobs" -I{} sh -c "{}"
nvcc -shared -cudart static -o "$out" "$objects"/*.o
