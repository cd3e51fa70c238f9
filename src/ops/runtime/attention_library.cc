#include "ops/runtime/attention_library.h"

#include <dlfcn.h>

#include <array>
#include <bit>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "cudnn_frontend.h"

namespace fe = cudnn_frontend;

// cuDNN's frontend looks up cuDNN's functions in this handle, so the program starts without cuDNN.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace tessera::cuda {
namespace {

/// The oldest version that is accepted. Older ones read uninitialized workspace on Hopper, in the backward with
/// documents (github.com/NVIDIA/TransformerEngine, issue 2186).
constexpr std::size_t kOldestVersion = 91800;

std::size_t round_up(std::size_t x, std::size_t to) { return (x + to - 1) / to * to; }

/// TESSERA_CUDNN(graph.execute(...)) checks a call that returns the frontend's error.
#define TESSERA_CUDNN(call)                                                                        \
  do {                                                                                             \
    auto tessera_status = (call);                                                                  \
    TESSERA_CHECK(tessera_status.is_good(), "{}: cuDNN: {}", #call, tessera_status.get_message()); \
  } while (false)

/// Identifies a tensor in a graph and when the graph runs.
enum Name : std::int64_t { kQ = 1, kK, kV, kO, kLse, kDO, kDQ, kDK, kDV, kLengths, kOfQ, kOfK, kOfV, kOfO, kOfLse };

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

struct Pass {
  AttentionShape shape;
  bool backward;
  bool operator==(const Pass&) const = default;
};

struct PassHash {
  std::size_t operator()(const Pass& pass) const {
    const AttentionShape& s = pass.shape;
    return hash_of({s.num_seqs, s.seq_len, s.num_heads, s.token_heads, s.dim_qk, s.dim_v, s.v_stride, s.max_documents,
                    std::int64_t{std::bit_cast<std::int32_t>(s.scale)} * 4 + s.deterministic * 2 + pass.backward});
  }
};

/// Builds the graph of a pass.
class Builder {
 public:
  explicit Builder(const AttentionShape& shape) : shape_(shape) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (shape.max_documents == 0) return;
    const std::int64_t documents = shape.max_documents;
    const auto table = [&](Name name, std::int64_t length, fe::DataType_t type) {
      return graph_->tensor(fe::graph::Tensor_attributes()
                                .set_uid(name)
                                .set_dim({length, 1, 1, 1})
                                .set_stride({1, 1, 1, 1})
                                .set_data_type(type));
    };
    lengths_ = table(kLengths, documents, fe::DataType_t::INT32);
    of_q_ = table(kOfQ, documents + 1, fe::DataType_t::INT64);
    of_k_ = table(kOfK, documents + 1, fe::DataType_t::INT64);
    of_v_ = table(kOfV, documents + 1, fe::DataType_t::INT64);
    of_o_ = table(kOfO, documents + 1, fe::DataType_t::INT64);
    of_lse_ = table(kOfLse, documents + 1, fe::DataType_t::INT64);
  }

  std::shared_ptr<fe::graph::Graph> forward() {
    const TensorPtr q = input(kQ), k = input(kK), v = input(kV);
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(shape_.scale)
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0);
    if (lengths_) options.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
    const auto [o, lse] = graph_->sdpa(q, k, v, options);
    describe(*o, kO);
    o->set_output(true);
    describe_lse(*lse, /*by_token=*/true);
    lse->set_output(true);
    return graph_;
  }

  std::shared_ptr<fe::graph::Graph> backward() {
    const TensorPtr q = input(kQ), k = input(kK), v = input(kV), o = input(kO), d_o = input(kDO);
    fe::graph::Tensor_attributes lse;
    describe_lse(lse, /*by_token=*/lengths_ != nullptr);
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_attn_scale(shape_.scale)
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0)
                       .set_deterministic_algorithm(shape_.deterministic);
    if (lengths_) {
      options.set_padding_mask(true)
          .set_seq_len_q(lengths_)
          .set_seq_len_kv(lengths_)
          .set_max_total_seq_len_q(shape_.num_tokens())
          .set_max_total_seq_len_kv(shape_.num_tokens());
    }
    const auto [d_q, d_k, d_v] = graph_->sdpa_backward(q, k, v, o, d_o, graph_->tensor(lse), options);
    describe(*d_q, kDQ);
    describe(*d_k, kDK);
    describe(*d_v, kDV);
    for (const TensorPtr& gradient : {d_q, d_k, d_v}) gradient->set_output(true);
    return graph_;
  }

 private:
  TensorPtr input(Name name) {
    fe::graph::Tensor_attributes tensor;
    describe(tensor, name);
    return graph_->tensor(tensor);
  }

  /// Describes a tensor. Its dims are sequences (or documents), heads, tokens, and numbers of a head.
  void describe(fe::graph::Tensor_attributes& tensor, Name name) const {
    const bool is_k = name == kK || name == kDK, is_v = name == kV || name == kDV, is_o = name == kO || name == kDO;
    const std::int64_t dim = is_v || is_o ? shape_.dim_v : shape_.dim_qk, head = is_v ? shape_.v_stride : dim;
    const std::int64_t token = (is_k ? shape_.num_heads : shape_.token_heads) * head;
    tensor.set_uid(name)
        .set_dim({batch(), shape_.num_heads, shape_.seq_len, dim})
        .set_stride({shape_.seq_len * token, head, token, 1})
        .set_data_type(fe::DataType_t::BFLOAT16);
    if (lengths_) tensor.set_ragged_offset(is_k ? of_k_ : is_v ? of_v_ : is_o ? of_o_ : of_q_);
  }

  void describe_lse(fe::graph::Tensor_attributes& tensor, bool by_token) const {
    const std::int64_t heads = shape_.num_heads, of_token = shape_.token_heads, tokens = shape_.seq_len;
    tensor.set_uid(kLse)
        .set_dim({batch(), heads, tokens, 1})
        .set_stride(by_token ? std::vector<std::int64_t>{of_token * tokens, 1, of_token, 1}
                             : std::vector<std::int64_t>{heads * tokens, tokens, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
    if (lengths_) tensor.set_ragged_offset(of_lse_);
  }

  std::int64_t batch() const { return lengths_ ? shape_.max_documents : shape_.num_seqs; }

  const AttentionShape& shape_;
  std::shared_ptr<fe::graph::Graph> graph_ = std::make_shared<fe::graph::Graph>();
  TensorPtr lengths_, of_q_, of_k_, of_v_, of_o_, of_lse_;  // null for whole sequences
};

}  // namespace

struct AttentionLibrary::Implementation {
  cudnnHandle_t handle = nullptr;
  std::unordered_map<Pass, std::shared_ptr<fe::graph::Graph>, PassHash> graphs;

  fe::graph::Graph& graph_of(const AttentionShape& shape, bool backward) {
    const Pass pass{shape, backward};
    if (const auto found = graphs.find(pass); found != graphs.end()) return *found->second;
    Builder builder(shape);
    auto graph = backward ? builder.backward() : builder.forward();
    TESSERA_CUDNN(graph->build(handle, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
    return *graphs.emplace(pass, std::move(graph)).first->second;
  }

  void run(const AttentionShape& shape, bool backward, const AttentionOperands& x, const DocumentTable& documents,
           std::byte* workspace) {
    std::unordered_map<std::int64_t, void*> memory{{kQ, x.q}, {kK, x.k}, {kV, x.v}, {kO, x.o}, {kLse, x.lse}};
    if (backward) memory.insert({{kDO, x.d_o}, {kDQ, x.d_q}, {kDK, x.d_k}, {kDV, x.d_v}});
    if (shape.max_documents > 0) {
      memory.insert({{kLengths, documents.lengths},
                     {kOfQ, documents.of_q},
                     {kOfK, documents.of_k},
                     {kOfV, documents.of_v},
                     {kOfO, documents.of_o},
                     {kOfLse, documents.of_lse}});
    }
    TESSERA_CUDNN(graph_of(shape, backward).execute(handle, memory, workspace));
  }
};

AttentionLibrary::AttentionLibrary(const Stream& stream) : implementation_(std::make_unique<Implementation>()) {
  if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  require(fe::cudnn_dlhandle != nullptr,
          "cuDNN 9 not found ({}): install it, or put the folder of its libcudnn.so.9 on LD_LIBRARY_PATH", dlerror());
  const std::size_t version = fe::detail::get_backend_version();
  require(version >= kOldestVersion, "cuDNN {} is too old: {}.{} or newer is needed",
          fe::detail::get_backend_version_string(), kOldestVersion / 10000, kOldestVersion / 100 % 100);
  const cudnnStatus_t status = fe::detail::create_handle(&implementation_->handle);
  require(status == CUDNN_STATUS_SUCCESS, "cuDNN cannot start: {}", fe::detail::get_error_string(status));
  TESSERA_CHECK(fe::detail::set_stream(implementation_->handle, stream.handle()) == CUDNN_STATUS_SUCCESS);
}

AttentionLibrary::~AttentionLibrary() {
  implementation_->graphs.clear();
  if (implementation_->handle != nullptr) fe::detail::destroy_handle(implementation_->handle);
}

bool AttentionLibrary::supports(const AttentionShape& shape) {
  const auto fits = [](std::int64_t dim) { return dim % 8 == 0 && 0 < dim && dim <= 128; };
  if (shape.seq_len < 2) return false;
  return (shape.dim_qk == 192 && shape.dim_v == 128) || (fits(shape.dim_qk) && fits(shape.dim_v));
}

std::size_t AttentionLibrary::estimated_workspace_bytes(const AttentionShape& shape, bool backward) {
  constexpr std::size_t kSmall = std::size_t{16} << 20;
  if (!backward) return kSmall;
  // Sums of d_q and of o · d_o are in float32. Tiles have at most 128 tokens. With documents there are sums for all
  // heads of a token, also if only a group of them is computed.
  const auto per_head = static_cast<std::size_t>(shape.num_seqs * shape.num_heads), tile = std::size_t{128};
  const auto summed =
      static_cast<std::size_t>(shape.num_seqs * (shape.max_documents > 0 ? shape.token_heads : shape.num_heads));
  const std::size_t tokens = round_up(static_cast<std::size_t>(shape.seq_len), tile);
  std::size_t bytes = kSmall + summed * tokens * (static_cast<std::size_t>(shape.dim_qk) + 2) * sizeof(float);
  // For a fixed order, d_q is summed from the stored gradients of all scores.
  if (shape.deterministic) {
    const auto rows = static_cast<std::size_t>(shape.max_documents > 0 ? shape.max_documents * shape.num_heads : 0);
    bytes += std::max(rows, per_head) * tokens * tokens * 2;
  }
  return bytes;
}

std::size_t AttentionLibrary::workspace_bytes(const AttentionShape& shape, bool backward) {
  std::int64_t bytes = 0;
  TESSERA_CUDNN(implementation_->graph_of(shape, backward).get_workspace_size(bytes));
  return static_cast<std::size_t>(bytes);
}

void AttentionLibrary::forward(const AttentionShape& shape, const AttentionOperands& operands,
                               const DocumentTable& documents, std::byte* workspace) {
  implementation_->run(shape, false, operands, documents, workspace);
}

void AttentionLibrary::backward(const AttentionShape& shape, const AttentionOperands& operands,
                                const DocumentTable& documents, std::byte* workspace) {
  implementation_->run(shape, true, operands, documents, workspace);
}

}  // namespace tessera::cuda
