// All-to-alls whose numbers of rows only the device knows. The GPU itself starts what goes over the network, by NCCL's
// device-initiated networking (GIN, nccl_device/gin.h). So the host waits for nothing, a graph can record the exchange,
// and only these rows are sent.
//
// Every rank has a send and a receive buffer, with a part for each other rank. In an exchange a rank
// 1. packs the rows for each other rank into the send buffer,
// 2. waits until the receive buffer of each other rank is empty, then puts the rows there, followed by a signal,
// 3. waits for the signals of the others, copies their rows out of its own receive buffer, and signals that the buffer
//    is empty.
// Each signal has one sender and grows by one per exchange. Only one thread block waits, so the other SMs are free.
#pragma once

#include <memory>

#include "comm/nccl_library.h"
#include "device/cuda.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

class CountedExchange {
 public:
  /// Registers buffers for tensors of up to `num_bytes`. All ranks of the communicator must call it together. `aborted`
  /// is RegisteredMemory's. Exchanges run on `stream`, which must outlive this. Returns null if NCCL has no GIN between
  /// these GPUs, or if it is not of the version that this was built for.
  static std::unique_ptr<CountedExchange> open(ncclComm_t communicator, std::shared_ptr<const bool> aborted,
                                               const Stream& stream, std::size_t num_bytes);
  /// Waits until the other ranks have taken what this one has sent.
  virtual ~CountedExchange() = default;

  /// Puts an exchange on the stream (ProcessGroup::all_to_all_counted).
  virtual void put(const Tensor& in, const Tensor& num_sent_P, const Tensor& out, const Tensor& num_received_P) = 0;
};

}  // namespace tessera::cuda
