#include "backend.h"

#include <Python.h>
#include <c10/core/ScalarType.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>

#include "callbacks.h"
#include "delegate_sockets.h"
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

constexpr int kMaxThreads = 64;

constexpr auto kDelegatePatience = std::chrono::seconds(1);

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

bool flag_from_environment(const char* name, bool otherwise) {
  const std::string value = environment(name);
  if (value.empty()) return otherwise;
  if (value == "1" || value == "0") return value == "1";
  throw UsageError(std::string("environment variable ") + name + "=\"" + value +
                   "\" is neither 0 nor 1");
}

int threads_from_environment() {
  const std::string value = environment("QCOLL_THREADS");
  if (value.empty()) return 1;
  int threads = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), threads);
  if (error == std::errc{} && end == value.data() + value.size() && threads >= 1 &&
      threads <= kMaxThreads)
    return threads;
  throw UsageError("environment variable QCOLL_THREADS=\"" + value +
                   "\" is not a number from 1 to " + std::to_string(kMaxThreads));
}

std::string encryption_from_environment() {
  const std::string value = environment("QCOLL_ENCRYPT");
  if (value.empty()) return "0";
  if (value == "0" || value == "1" || value == "native") return value;
  throw UsageError("environment variable QCOLL_ENCRYPT=\"" + value +
                   "\" is not 0, 1 (all that goes over TCP) or native (but not what goes through "
                   "the delegate)");
}

comm::GroupConfig config_of(int rank, int size, const BackendOptions& options) {
  // Before the braces: what throws inside them would have members destroyed twice by GCC 12.
  const bool share_memory = flag_from_environment("QCOLL_SHM", true);
  const std::string encryption = encryption_from_environment();
  const int threads = threads_from_environment();
  comm::GroupConfig config{
      .rank = rank,
      .size = size,
      .options = {},
      .node = environment("QCOLL_NODE"),
      .agreement = "qcoll version=" QCOLL_VERSION "; QCOLL_ENCRYPT=" + encryption,
      .share_memory = share_memory,
      .encrypt = encryption != "0",
      .threads = threads,
      .dump_directory = environment("QCOLL_DUMP"),
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
                 const Pointer<BackendOptions>& options)
    : c10d::Backend(rank, size),
      owner_pid_(::getpid()),
      options_(options),
      encryption_(encryption_from_environment()) {
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
  group_->abort_flag().unsubscribe(delegate_subscription_);
  if (owner_pid_ != ::getpid()) {
    // A forked child's copies: their threads do not exist here, and joining them would not end.
    (void)delegate_.release();
    new std::shared_ptr<comm::Group>(group_);
    return;
  }
  close(std::chrono::milliseconds(0));
  // A failure has ended the delegate's connections, and its calls are on their way back. One that
  // is still stuck would block here until its own timeout; it is better left behind.
  const Deadline patience(kDelegatePatience);
  while (delegate_ && group_->delegated_in_flight() > 0 && !patience.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (delegate_ && group_->delegated_in_flight() > 0) (void)delegate_.release();
}

void Backend::meet() {
  const std::vector<Rank> absent =
      group_->mesh().links().monitored_barrier(Deadline(options_->timeout));
  if (absent.empty()) return;
  throw group_->fail_with_best_cause(TransportError(
      "rank " + std::to_string(absent.front()) + " did not come to connect its delegate within " +
          std::to_string(options_->timeout.count()) + " ms",
      absent.front()));
}

void Backend::set_delegate(Pointer<c10d::Backend> delegate, std::vector<std::uint16_t> ports) {
  delegate_ = std::move(delegate);
  delegate_subscription_ = group_->abort_flag().subscribe(
      [ports = std::move(ports)](const TransportError&) { end_connections_accepted_on(ports); });
}

void Backend::fail_without_delegate(const std::string& reason) {
  throw group_->fail_with_best_cause(TransportError(
      "rank " + std::to_string(rank_) + " could not make its delegate backend: " + reason, rank_));
}

void Backend::close(std::chrono::milliseconds grace) { group_->shutdown(grace); }

void Backend::shutdown() {
  const WithoutGil without_gil;
  close(kShutdownGrace);
}

void Backend::shutdown_all(std::chrono::milliseconds grace) {
  const WithoutGil without_gil;
  begin_interpreter_exit();
  // Their groups, not the backends themselves: one of those may be in its destructor already.
  std::vector<std::shared_ptr<comm::Group>> groups;
  {
    const std::lock_guard lock(live_mutex());
    for (const Backend* backend : live_backends())
      if (backend->owner_pid_ == ::getpid()) groups.push_back(backend->group_);
  }
  for (const auto& group : groups) group->shutdown(grace);
  Callbacks::shared().wait_idle_for(grace);
  end_interpreter_exit();
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
  const auto found = coalescing_.find(std::this_thread::get_id());
  if (found == coalescing_.end()) return work;
  // An exception in the caller's block leaves it open for good: keep nothing that is over.
  std::erase_if(found->second,
                [](const auto& earlier) { return earlier->isCompleted() && earlier->isSuccess(); });
  found->second.push_back(work);
  return work;
}

comm::Plan Backend::explain(const std::string& verb, std::size_t numel, at::ScalarType dtype,
                            const c10d::ReduceOp& op, const Codec& codec) const {
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
  const Verb& what = found->second;
  const auto& topology = group_->topology();
  const bool whole_slices = what.collective != wire::Collective::kAllReduce;
  if (whole_slices && numel % static_cast<std::size_t>(size_) != 0)
    throw UsageError("qcoll.explain: " + verb + " takes a multiple of the world size (" +
                     std::to_string(size_) + ") elements, got " + std::to_string(numel));
  const at::Tensor sample = summable_view(
      at::empty({static_cast<std::int64_t>(0)}, at::TensorOptions().dtype(dtype)), op);
  const std::size_t bytes = numel * c10::elementSize(dtype);
  std::optional<comm::CodecList> given;
  if (codec) given = comm::parse_codec_list("codec", *codec);
  const DType type = dtype_of(sample);
  const bool reduces = what.collective == wire::Collective::kReduceScatter ||
                       what.collective == wire::Collective::kAllReduce;
  if (reduces && !native_reduction(op, type)) {
    const std::string here = std::string(name_of(type)) + " and " + text_of(op);
    if (given)
      throw UsageError(
          "qcoll.explain: a codec needs float32, bfloat16 or float16 and sum, avg or premul_sum, "
          "got " +
          here);
    comm::Plan plan;
    plan.algorithm = delegate_ ? "the delegate's" : "gathers, and every rank reduces";
    plan.topology = topology.describe();
    plan.exact_because = std::string(delegate_ ? "delegated: " : "") +
                         "the engine reduces float32, bfloat16 and float16, by sum, avg "
                         "and premul_sum; here " +
                         here;
    plan.payload_bytes = bytes;
    return plan;
  }
  const comm::CallFacts facts{.collective = what.collective,
                              .dtype = type,
                              .bytes = bytes,
                              .coalesced = what.coalesced,
                              .list_form = what.list_form,
                              .spans_nodes = topology.spans_nodes(),
                              .costs = group_->costs()};
  const comm::Choice choice = comm::choose(group_->options(), thread_policy(), given, facts);
  comm::Plan plan = comm::explain(topology, group_->node_labels(), what.collective, type,
                                  bytes / element_bytes(type), choice);
  plan.predicted = comm::predict(group_->options(), thread_policy(), given, facts);
  for (const Rank peer : topology.node_ranks())
    if (peer != rank_ && !group_->mesh().mapped(peer))
      plan.not_in_shared_memory[peer] = group_->mesh().not_mapped_because(peer);
  return plan;
}

}  // namespace qcoll::torch_binding
