// The torch.distributed backend. Bulk verbs run on qcoll's engine; what qcoll does not change goes
// to a delegate, the device's own backend (gloo).
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "options.h"
#include "qcoll/comm/explain.h"
#include "qcoll/comm/group.h"
#include "work.h"

namespace qcoll::torch_binding {

using Tensors = std::vector<at::Tensor>;
template <class T>
using Pointer = c10::intrusive_ptr<T>;

class Backend final : public c10d::Backend {
 public:
  // Collective over all ranks. Without a delegate, verbs that need it are errors.
  Backend(const Pointer<c10d::Store>& store, int rank, int size,
          const Pointer<BackendOptions>& options);
  ~Backend() override;

  // Shuts down every backend of this process that still lives; for the exit of the interpreter.
  static void shutdown_all(std::chrono::milliseconds grace);

  // A group that encrypts all it sends has no delegate, which cannot.
  bool may_delegate() const { return encryption_ != "1"; }
  const std::string& encryption() const { return encryption_; }
  // Before the delegate connects, which cannot be interrupted: throws what failed the group, also
  // when ranks do not come within its timeout.
  void meet();
  // `ports`: where the delegate listens. Once, before the first call.
  void set_delegate(Pointer<c10d::Backend> delegate, std::vector<std::uint16_t> ports);
  // This rank could not make its delegate: ends the group on all ranks, and throws its cause.
  [[noreturn]] void fail_without_delegate(const std::string& reason);

  const std::string getBackendName() const override { return "qcoll"; }
  Pointer<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return group_->latest_sequence(); }
  void shutdown() override;
  void abort() override;
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {}
  void startCoalescing() override;
  Pointer<c10d::Work> endCoalescing() override;

  // On qcoll's engine (backend_gather.cc, backend_reduce.cc, backend_all_to_all.cc).
  Pointer<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) override;
  Pointer<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override;
  Pointer<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) override;
  Pointer<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) override;
  Pointer<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) override;
  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  Pointer<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Pointer<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) override;
  Pointer<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<std::int64_t>& output_splits,
                                    std::vector<std::int64_t>& input_splits,
                                    const c10d::AllToAllOptions& opts) override;
  Pointer<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) override;

  // Over the control links.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // On the delegate (backend_delegated.cc).
  Pointer<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Pointer<c10d::Work> allreduce_sparse(Tensors& tensors,
                                       const c10d::AllreduceOptions& opts) override;
  Pointer<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Pointer<c10d::Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  Pointer<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) override;
  Pointer<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& opts) override;
  Pointer<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  // On the delegate, too (backend_point_to_point.cc).
  Pointer<c10d::Work> send(Tensors& tensors, int to, int tag) override;
  Pointer<c10d::Work> recv(Tensors& tensors, int from, int tag) override;
  Pointer<c10d::Work> recvAnysource(Tensors& tensors, int tag) override;

  // The explicit verbs: `codec` is a codec list ("int8", "int8/int4"), or nothing for the options.
  using Codec = std::optional<std::string>;
  Pointer<c10d::Work> all_gather_with(at::Tensor output, at::Tensor input, const Codec& codec,
                                      bool async_op);
  Pointer<c10d::Work> reduce_scatter_with(at::Tensor output, at::Tensor input,
                                          const c10d::ReduceOp& op, const Codec& codec,
                                          bool async_op);
  Pointer<c10d::Work> all_reduce_with(at::Tensor tensor, const c10d::ReduceOp& op,
                                      const Codec& codec, bool async_op);
  Pointer<c10d::Work> all_to_all_with(at::Tensor output, at::Tensor input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, const Codec& codec,
                                      bool async_op);

  // `numel`: elements of the gathered, unreduced, reduced or exchanged tensor.
  comm::Plan explain(const std::string& verb, std::size_t numel, at::ScalarType dtype,
                     const c10d::ReduceOp& op, const Codec& codec) const;
  comm::Group& group() { return *group_; }

 private:
  // What a native call is, apart from its tensors.
  struct NativeCall {
    const char* verb;   // of torch.distributed; the key in stats
    const char* title;  // in profiles
    c10d::OpType type;
    wire::Collective collective;
    std::optional<comm::CodecList> codec = std::nullopt;  // given in the call
    bool coalesced = false;
    bool list_form = false;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool async_op = true;
  };
  // One schedule of a call: its policy is resolved on the calling thread and carried by value.
  struct Step {
    std::string text;  // what all ranks must agree on
    std::string verb;
    DType dtype;
    comm::Choice choice;
    std::function<void(const comm::Call&)> run;
  };

  Step make_step(const NativeCall& call, const at::Tensor& tensor, std::size_t bytes,
                 const std::string& what, std::function<void(const comm::Call&)> run) const;
  Pointer<c10d::Work> run_native(const NativeCall& call, const Tensors& inputs,
                                 const Tensors& outputs, std::vector<Step> steps);
  Step gather_step(const NativeCall& call, const at::Tensor& output, const at::Tensor& input) const;
  Step scatter_step(const NativeCall& call, comm::Reduction reduction, const at::Tensor& output,
                    const at::Tensor& input) const;
  Step reduce_step(const NativeCall& call, comm::Reduction reduction,
                   const at::Tensor& tensor) const;
  Pointer<c10d::Work> gather_into(NativeCall call, const at::Tensor& output,
                                  const at::Tensor& input);
  Pointer<c10d::Work> scatter_from(NativeCall call, const at::Tensor& output,
                                   const at::Tensor& input, const c10d::ReduceOp& op);
  Pointer<c10d::Work> reduce_all(NativeCall call, const at::Tensor& tensor,
                                 const c10d::ReduceOp& op);
  Pointer<c10d::Work> exchange_all(NativeCall call, const at::Tensor& output,
                                   const at::Tensor& input, std::vector<std::int64_t> output_splits,
                                   std::vector<std::int64_t> input_splits);
  Step exchange_step(const NativeCall& call, const at::Tensor& sample, std::size_t bytes,
                     const Tensors& inputs, const Tensors& outputs) const;

  // The delegate's verbs in a group without one (backend_without_delegate.cc).
  Pointer<c10d::Work> broadcast_natively(const at::Tensor& tensor,
                                         const c10d::BroadcastOptions& opts);
  Pointer<c10d::Work> gather_natively(const at::Tensor& input, const std::vector<Tensors>& outputs,
                                      const c10d::GatherOptions& opts);
  Pointer<c10d::Work> scatter_natively(const at::Tensor& output, const std::vector<Tensors>& inputs,
                                       const c10d::ScatterOptions& opts);
  Pointer<c10d::Work> reduce_natively(const at::Tensor& tensor, const c10d::ReduceOptions& opts);
  Pointer<c10d::Work> reduce_gathered(NativeCall call, const at::Tensor& tensor,
                                      const c10d::ReduceOp& op);
  Pointer<c10d::Work> barrier_natively(const c10d::BarrierOptions& opts);
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds given) const;

  using Delegated = std::function<Pointer<c10d::Work>(c10d::Backend&)>;
  Pointer<c10d::Work> delegate(const char* verb, c10d::OpType type, const std::string& text,
                               const Tensors& inputs, Tensors outputs,
                               std::chrono::milliseconds timeout, bool async_op,
                               const Delegated& call);
  Pointer<c10d::Work> point_to_point(const char* verb, c10d::OpType type, const Tensors& tensors,
                                     int peer, const Delegated& call);
  c10d::Backend& delegate_or_throw(const char* verb) const;
  void close(std::chrono::milliseconds grace);
  Pointer<c10d::Work> track(Pointer<c10d::Work> work);  // for endCoalescing

  const int owner_pid_;
  const Pointer<BackendOptions> options_;
  const std::string encryption_;  // QCOLL_ENCRYPT
  Pointer<c10d::Backend> delegate_;
  std::shared_ptr<comm::Group> group_;  // shared with callbacks of the delegate
  std::uint64_t delegate_subscription_ = 0;

  std::mutex coalescing_mutex_;
  std::map<std::thread::id, std::vector<Pointer<c10d::Work>>> coalescing_;
};

}  // namespace qcoll::torch_binding
