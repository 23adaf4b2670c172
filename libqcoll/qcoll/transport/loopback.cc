#include "qcoll/transport/loopback.h"

#include <sys/socket.h>

#include <cerrno>
#include <mutex>

#include "qcoll/transport/bell.h"

namespace qcoll::transport {
namespace {

struct Fabric {
  struct Endpoint {
    std::shared_ptr<Memory> memory;
    Bell bell;
    std::vector<Rank> neighbours;
    std::mutex mutex;
    std::vector<Connection> accepted;
  };

  explicit Fabric(std::size_t size) : endpoints(size) {}

  std::vector<Endpoint> endpoints;
  std::vector<int> node_of;
  LoopbackOptions options;
  AbortFlag abort;
};

class Loopback final : public Mesh {
 public:
  Loopback(std::shared_ptr<Fabric> fabric, Rank rank) : fabric_(std::move(fabric)), rank_(rank) {}

  Rank rank() const override { return rank_; }
  int size() const override { return static_cast<int>(fabric_->endpoints.size()); }
  const std::vector<Rank>& neighbours() const override { return self().neighbours; }

  bool mapped(Rank peer) const override {
    return peer != rank_ && fabric_->options.map_neighbours &&
           fabric_->node_of[peer] == fabric_->node_of[rank_];
  }
  Memory& memory_of(Rank peer) override { return *fabric_->endpoints[peer].memory; }
  void ring(Rank peer) override { fabric_->endpoints[peer].bell.ring(); }

  int bell_fd() const override { return self().bell.listen_fd(); }
  void quiet_bell() override { self().bell.quiet(); }

  Connection connect(Rank peer, const Deadline&) override {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
      throw TransportError(system_error_text("socketpair", errno));
    if (const int bytes = fabric_->options.stream_buffer_bytes; bytes > 0)
      ::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    auto& other = fabric_->endpoints[peer];
    {
      const std::lock_guard lock(other.mutex);
      other.accepted.emplace_back(Fd(ends[1]), rank_);
    }
    other.bell.ring();
    return {Fd(ends[0]), peer};
  }
  std::vector<Connection> take_accepted() override {
    const std::lock_guard lock(self().mutex);
    return std::exchange(self().accepted, {});
  }

  AbortFlag& abort_flag() override { return fabric_->abort; }
  bool departed(Rank) const override { return false; }
  bool may_spin() const override { return false; }
  void probe_peers() override {}
  StallReport stall_report() override { return {}; }

 private:
  Fabric::Endpoint& self() const { return fabric_->endpoints[rank_]; }

  std::shared_ptr<Fabric> fabric_;
  Rank rank_;
};

}  // namespace

std::vector<std::unique_ptr<Mesh>> make_loopback(const std::vector<int>& node_of,
                                                 const LoopbackOptions& options) {
  const std::size_t size = node_of.size();
  auto fabric = std::make_shared<Fabric>(size);
  fabric->node_of = node_of;
  fabric->options = options;
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (std::size_t r = 0; r < size; ++r) {
    auto& endpoint = fabric->endpoints[r];
    endpoint.memory = Memory::create(options.memory_bytes);
    endpoint.bell = Bell::create();
    for (std::size_t peer = 0; peer < size; ++peer)
      if (node_of[peer] == node_of[r]) endpoint.neighbours.push_back(static_cast<Rank>(peer));
    meshes.push_back(std::make_unique<Loopback>(fabric, static_cast<Rank>(r)));
  }
  return meshes;
}

}  // namespace qcoll::transport
