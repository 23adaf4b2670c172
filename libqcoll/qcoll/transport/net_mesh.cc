#include "qcoll/transport/net_mesh.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <thread>

#include "qcoll/base/error.h"

namespace qcoll::transport {
namespace {

// A random mark behind the first flag of the memory proves that /proc led to the right file.
constexpr std::size_t kMarkOffset = 16;
using Mark = wire::Nonce;

std::string to_hex(const Mark& mark) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte b : mark) {
    text += kDigits[static_cast<int>(b) >> 4];
    text += kDigits[static_cast<int>(b) & 15];
  }
  return text;
}

// A rank that refuses after it had links tells its cause over them too.
constexpr auto kNoticePatience = std::chrono::milliseconds(200);
constexpr auto kLookEvery = std::chrono::milliseconds(500);

std::size_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<std::size_t>(CPU_COUNT(&set))
                                                        : 1;
}

}  // namespace

NetMesh::NetMesh(Rendezvous& store, Rank rank, int size, const NetOptions& options,
                 std::shared_ptr<OperationLog> log, const Deadline& deadline)
    : owner_pid_(::getpid()),
      rank_(rank),
      bell_(std::make_shared<const Bell>(Bell::create())),
      plane_(ControlPlane::shared()),
      share_memory_(options.share_memory) {
  GroupSecret secret = share_secret(store, rank, size, deadline);
  links_ = std::make_shared<GroupLinks>(rank, size, secret.group, secret.secret, std::move(log),
                                        bell_, options.encrypt);
  // Before the address is published: a peer may dial as soon as it is.
  plane_->add(links_);
  try {
    const Identity mine =
        own_identity(rank, options.node, plane_->port(), plane_->addresses(), options.agreement);
    identities_ = roll_call(store, mine, secret, deadline);
    std::vector<PeerAddress> peers;
    for (const Identity& other : identities_)
      peers.push_back({addresses_to_dial(mine, other), other.port, other.label()});
    links_->connect_all(std::move(peers), deadline, [&](Rank peer) { check_on(store, peer); });
    plane_->wake();
  } catch (const TransportError& error) {
    links_->abort(error);  // over the links that are open, with the rank that is to blame
    links_->leave();
    plane_->remove(*links_);
    throw;
  } catch (...) {
    links_->leave();
    plane_->remove(*links_);
    throw;
  }
  const Identity& mine = identities_[rank];
  std::size_t on_this_host = 0;
  for (const Identity& other : identities_) {
    if (other.node == mine.node) neighbours_.push_back(other.rank);
    if (other.boot_id == mine.boot_id) ++on_this_host;
  }
  may_spin_ = on_this_host <= usable_cpus();
}

// While `peer` does not connect: throws why, if that can be known.
void NetMesh::check_on(Rendezvous& store, Rank peer) const {
  // Deaths first: a refusal may be the effect of one, and does not carry the rank that is to blame.
  for (const Identity& other : identities_) check_alive(identities_[rank_], other);
  try {
    check_refusal_of(store, peer);
  } catch (const TransportError&) {
    const Deadline patience(kNoticePatience);
    while (!links_->abort_flag().raised() && !patience.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    links_->abort_flag().throw_if_raised();
    throw;
  }
}

NetMesh::~NetMesh() {
  if (owner_pid_ != ::getpid()) return;  // a forked child's copy; the group is its parent's
  links_->leave();
  plane_->remove(*links_);
}

std::vector<std::string> NetMesh::node_labels() const {
  std::vector<std::string> labels;
  for (const Identity& id : identities_) labels.push_back(id.node);
  return labels;
}

// 1. Publish where the own memory is. 2. Map that of each neighbour. 3. Tell which worked: two
// ranks share memory when both could map the other.
void NetMesh::share_memory(Rendezvous& store, std::size_t bytes, const Deadline& deadline) {
  memory_ = Memory::create(bytes);
  if (neighbours_.size() == 1) return;
  Mark mark;
  wire::fill_random(mark);
  std::memcpy(memory_->data() + kMarkOffset, mark.data(), mark.size());
  std::ostringstream record;
  record << memory_->fd() << ' ' << bytes << ' ' << bell_->ring_fd() << ' ' << to_hex(mark);
  store.set(group_key(group(), "memory", rank_), record.str());

  std::string worked;
  for (const Rank peer : neighbours_) {
    if (peer != rank_) attach(peer, record_of(store, "memory", peer, deadline));
    worked += peer == rank_ || attached_.contains(peer) ? '1' : '0';
  }
  store.set(group_key(group(), "mapped", rank_), worked);
  const auto me = std::find(neighbours_.begin(), neighbours_.end(), rank_) - neighbours_.begin();
  for (const Rank peer : neighbours_) {
    if (peer == rank_) continue;
    const std::string theirs = record_of(store, "mapped", peer, deadline);
    if (theirs.size() != neighbours_.size())
      throw TransportError("the rendezvous store holds a malformed record of rank " +
                               std::to_string(peer) + ": it mapped \"" + theirs + "\"",
                           peer);
    if (attached_.contains(peer) && theirs.at(me) != '1') {
      attached_.erase(peer);
      not_mapped_[peer] = "rank " + std::to_string(peer) + " could not map this rank's memory";
    }
  }
  memory_->seal();
}

std::string NetMesh::record_of(Rendezvous& store, const std::string& what, Rank peer,
                               const Deadline& deadline) {
  for (;;) {
    try {
      const auto left = deadline.at() - Clock::now();
      return store.get(group_key(group(), what, peer),
                       Deadline(std::min<Clock::duration>(left, kLookEvery)));
    } catch (const TransportError& error) {
      links_->abort_flag().throw_if_raised();
      if (deadline.passed())
        throw TransportError("timed out after " + std::to_string(deadline.timeout_seconds()) +
                                 " s: " + identities_[peer].label() +
                                 " joined the group, but did not share its memory (" +
                                 error.what() + ")",
                             peer);
    }
  }
}

void NetMesh::attach(Rank peer, const std::string& record) {
  if (!share_memory_) {
    not_mapped_[peer] = "shared memory is switched off (QCOLL_SHM=0)";
    return;
  }
  if (!may_share_memory(identities_[rank_], identities_[peer])) {
    not_mapped_[peer] = "it runs under another kernel or in another PID namespace";
    return;
  }
  try {
    std::istringstream fields(record);
    int memory_fd = -1;
    std::size_t bytes = 0;
    int bell_fd = -1;
    std::string mark;
    fields >> memory_fd >> bytes >> bell_fd >> mark;
    if (bytes != memory_->bytes())
      throw TransportError("its memory has " + std::to_string(bytes) + " bytes, expected " +
                           std::to_string(memory_->bytes()));
    const int pid = identities_[peer].pid;
    Attached attached{Memory::attach(pid, memory_fd, bytes), Bell::attach(pid, bell_fd)};
    Mark found;
    std::memcpy(found.data(), attached.memory->data() + kMarkOffset, found.size());
    if (to_hex(found) != mark) throw TransportError("the memory found is not its own");
    attached_.emplace(peer, std::move(attached));
    not_mapped_[peer] = "";
  } catch (const TransportError& error) {
    not_mapped_[peer] = error.what();
  }
}

Memory& NetMesh::memory_of(Rank peer) {
  return peer == rank_ ? *memory_ : *attached_.at(peer).memory;
}

Connection NetMesh::connect(Rank peer, const Deadline& deadline) {
  return links_->dial_data(peer, deadline);
}

}  // namespace qcoll::transport
