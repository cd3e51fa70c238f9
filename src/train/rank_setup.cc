#include "train/rank_setup.h"

#include <algorithm>

#include "tensor/parallel.h"

namespace tessera {

void set_threads(const JobConfig& config, const Ranks& ranks) {
  if (config.training.num_threads > 0) {
    set_num_threads(static_cast<int>(config.training.num_threads));
  } else if (ranks.size() > 1) {
    set_num_threads(std::max(1, num_cores() / ranks.num_on_node()));
  }
}

std::shared_ptr<cuda::Runtime> join_gpus(ProcessGroup& world, int device) {
  cuda::use_device(device);
  const std::shared_ptr<cuda::Runtime> runtime = cuda::make_runtime();
  world.use_gpu(runtime->stream());
  runtime->set_wait([&world](const cuda::Event& event) { world.wait_for_gpu(event, "the GPU's work"); });
  return runtime;
}

std::shared_ptr<cuda::Runtime> join_gpus(const JobConfig& config, Ranks& ranks) {
  if (config.device(ranks.num_on_node()) == Device::kCpu) return nullptr;
  if (ranks.size() == 1) return cuda::make_runtime();
  return join_gpus(ranks.world(), ranks.rank_on_node() % cuda::num_devices());
}

std::shared_ptr<Mesh> make_mesh(const JobConfig& config, Ranks& ranks) {
  const MeshDegrees degrees = resolve(config.mesh_degrees(), ranks.size());
  config.validate_on(degrees);
  return std::make_shared<Mesh>(ranks.world(), degrees);
}

}  // namespace tessera
