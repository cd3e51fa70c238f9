#include "train/rank_setup.h"

namespace tessera {

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
