#include "backend.h"

#include <Python.h>
#include <c10/core/ScalarType.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "callbacks.h"
#include "interpreter_exit.h"
#include "qcoll/base/error.h"
#include "qcoll/transport/roll_call.h"
#include "tensor_args.h"
#include "thread_policy.h"
#include "torch_store.h"
#include "version.h"

namespace qcoll::torch_binding {
namespace {

// How long an orderly shutdown waits for calls in flight.
constexpr auto kShutdownGrace = std::chrono::seconds(5);

// Backends that live, for the exit of the interpreter. Never destroyed: exit order does not matter.
std::mutex& live_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::set<Backend*>& live_backends() {
  static auto* const backends = new std::set<Backend*>;
  return *backends;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

comm::GroupConfig config_of(int rank, int size, const BackendOptions& options) {
  comm::GroupConfig config{.rank = rank,
                           .size = size,
                           .options = {},
                           .node = environment("QCOLL_NODE"),
                           .agreement = "qcoll version=" QCOLL_VERSION,
                           .share_memory = environment("QCOLL_SHM") != "0",
                           .timeout = options.timeout};
  comm::Settings::from_environment().apply_to(config.options);
  options.settings.apply_to(config.options);
  return config;
}

// Threads that end here may need the interpreter lock to drop tensors; give it up while waiting.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace

Backend::Backend(const Pointer<c10d::Store>& store, int rank, int size,
                 const Pointer<BackendOptions>& options, Pointer<c10d::Backend> delegate)
    : c10d::Backend(rank, size),
      owner_pid_(::getpid()),
      options_(options),
      delegate_(std::move(delegate)) {
  const WithoutGil without_gil;
  TorchStore rendezvous(store);
  try {
    group_ = std::make_shared<comm::Group>(rendezvous, config_of(rank, size, *options));
  } catch (const std::exception& error) {
    const bool usage = dynamic_cast<const UsageError*>(&error) != nullptr;
    transport::refuse_to_join(rendezvous, rank, usage, error.what());
    throw;
  }
  const std::lock_guard lock(live_mutex());
  live_backends().insert(this);
}

Backend::~Backend() {
  {
    const std::lock_guard lock(live_mutex());
    live_backends().erase(this);
  }
  const WithoutGil without_gil;
  if (owner_pid_ != ::getpid()) {
    // A forked child's copies: their threads do not exist here, and joining them would not end.
    (void)delegate_.release();
    new std::shared_ptr<comm::Group>(group_);
    return;
  }
  close(std::chrono::milliseconds(0));
  // A delegate that is still stuck in a call would block here until that call's timeout, and its
  // abort wakes nobody. It is better left behind.
  if (delegate_ && group_->delegated_in_flight() > 0) (void)delegate_.release();
}

void Backend::close(std::chrono::milliseconds grace) { group_->shutdown(grace); }

void Backend::shutdown() {
  const WithoutGil without_gil;
  close(kShutdownGrace);
  Callbacks::shared().wait_idle();
}

void Backend::shutdown_all(std::chrono::milliseconds grace) {
  const WithoutGil without_gil;
  begin_interpreter_exit();
  std::vector<Pointer<Backend>> backends;
  {
    const std::lock_guard lock(live_mutex());
    for (Backend* backend : live_backends())
      backends.push_back(Pointer<Backend>::reclaim_copy(backend));
  }
  for (const auto& backend : backends) backend->close(grace);
  if (!backends.empty()) Callbacks::shared().wait_idle();
}

void Backend::abort() {
  const WithoutGil without_gil;
  group_->abort("rank " + std::to_string(rank_) + " called abort()");
}

c10d::ErrorType Backend::getError() {
  return group_->abort_flag().raised() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (delegate_) delegate_->setTimeout(timeout);
}

std::chrono::milliseconds Backend::timeout_of(std::chrono::milliseconds given) const {
  return given == c10d::kUnsetTimeout ? options_->timeout : given;
}

// The device form of torch's coalescing manager: ops between start and end are ordinary ones, and
// the work that end returns covers them all.
void Backend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_[std::this_thread::get_id()].clear();
}

Pointer<c10d::Work> Backend::endCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  auto node = coalescing_.extract(std::this_thread::get_id());
  return c10::make_intrusive<JoinedWork>(
      rank_, node.empty() ? std::vector<Pointer<c10d::Work>>{} : std::move(node.mapped()));
}

Pointer<c10d::Work> Backend::track(Pointer<c10d::Work> work) {
  const std::lock_guard lock(coalescing_mutex_);
  if (const auto found = coalescing_.find(std::this_thread::get_id()); found != coalescing_.end())
    found->second.push_back(work);
  return work;
}

comm::Plan Backend::explain(const std::string& verb, std::size_t numel, at::ScalarType dtype,
                            const Codec& codec) const {
  struct Verb {
    wire::Collective collective;
    bool coalesced = false;
    bool list_form = false;
  };
  static const std::map<std::string, Verb> kVerbs = {
      {"all_gather_into_tensor", {wire::Collective::kAllGather}},
      {"all_gather_single", {wire::Collective::kAllGather}},
      {"all_gather_into_tensor_coalesced", {wire::Collective::kAllGather, true}},
      {"all_gather", {wire::Collective::kAllGather, false, true}},
      {"reduce_scatter_tensor", {wire::Collective::kReduceScatter}},
      {"reduce_scatter_single", {wire::Collective::kReduceScatter}},
      {"reduce_scatter_tensor_coalesced", {wire::Collective::kReduceScatter, true}},
      {"reduce_scatter", {wire::Collective::kReduceScatter, false, true}},
      {"all_reduce", {wire::Collective::kAllReduce}},
      {"all_reduce_coalesced", {wire::Collective::kAllReduce, true}},
      {"all_to_all_single", {wire::Collective::kAllToAll}},
      {"all_to_all", {wire::Collective::kAllToAll, false, true}},
  };
  const auto found = kVerbs.find(verb);
  if (found == kVerbs.end()) {
    std::string known;
    for (const auto& [name, v] : kVerbs) known += (known.empty() ? "" : ", ") + name;
    throw UsageError("qcoll.explain: unknown verb \"" + verb + "\"; it knows " + known);
  }
  const at::Tensor sample = at::empty({0}, at::TensorOptions().dtype(dtype));
  const std::size_t bytes = numel * sample.element_size();
  std::optional<comm::CodecList> given;
  if (codec) given = comm::parse_codec_list("codec", *codec);
  const DType type = dtype_of(sample);
  const auto& topology = group_->topology();
  const comm::Choice choice = comm::choose(group_->options(), thread_policy(), given,
                                           {.collective = found->second.collective,
                                            .dtype = type,
                                            .bytes = bytes,
                                            .coalesced = found->second.coalesced,
                                            .list_form = found->second.list_form,
                                            .spans_nodes = topology.spans_nodes()});
  return comm::explain(topology, group_->node_labels(), found->second.collective, type,
                       bytes / element_bytes(type), choice);
}

}  // namespace qcoll::torch_binding
