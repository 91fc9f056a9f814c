// Which plan for which problem.
#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

// What choosing needs to know of a device.
struct Device {
  int sm_count = 0;
  int architecture = 0;  // 90 for sm_90
  bool hopper = false;   // the sm_90a kernels are built and run here
};

Device current_device();

// The fastest known plan: from the tuning table if it holds the shape, else by a model of the kernels' times.
Plan choose_plan(const LinearProblem& problem, const Device& device);

// Microseconds by that model; infinite for a plan that it does not cover.
double modelled_time(const LinearProblem& problem, const Plan& plan, const Device& device);

}  // namespace onnxfuse::cuda
