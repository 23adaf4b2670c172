// The real mesh: shared memory between ranks of one node, TCP between all others.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "qcoll/transport/bell.h"
#include "qcoll/transport/control_plane.h"
#include "qcoll/transport/group_links.h"
#include "qcoll/transport/mesh.h"
#include "qcoll/transport/operation_log.h"
#include "qcoll/transport/rendezvous.h"
#include "qcoll/transport/roll_call.h"

namespace qcoll::transport {

struct NetOptions {
  std::string node;       // label; empty: host name and boot id
  std::string agreement;  // see Identity
  bool share_memory = true;
  bool encrypt = false;  // TCP; the same on all ranks
};

class NetMesh final : public Mesh {
 public:
  // Meets the other ranks: identities, agreement, control links. Collective over all ranks.
  NetMesh(Rendezvous& store, Rank rank, int size, const NetOptions& options,
          std::shared_ptr<OperationLog> log, const Deadline& deadline);
  ~NetMesh() override;

  std::vector<std::string> node_labels() const;
  const std::vector<Identity>& identities() const { return identities_; }
  std::uint64_t group() const { return links_->group(); }
  GroupLinks& links() { return *links_; }

  // Makes this rank's memory and maps that of its node's ranks. Collective over a node.
  void share_memory(Rendezvous& store, std::size_t bytes, const Deadline& deadline);
  // Why a rank of the same node is reached by TCP; empty when it is mapped.
  const std::string& not_mapped_because(Rank peer) const { return not_mapped_.at(peer); }

  Rank rank() const override { return rank_; }
  int size() const override { return static_cast<int>(identities_.size()); }
  const std::vector<Rank>& neighbours() const override { return neighbours_; }
  bool mapped(Rank peer) const override { return attached_.contains(peer); }
  Memory& memory_of(Rank peer) override;
  void ring(Rank peer) override { attached_.at(peer).bell.ring(); }
  int bell_fd() const override { return bell_->listen_fd(); }
  void quiet_bell() override { bell_->quiet(); }
  Connection connect(Rank peer, const Deadline& deadline) override;
  std::vector<Connection> take_accepted() override { return links_->take_accepted(); }
  AbortFlag& abort_flag() override { return links_->abort_flag(); }
  bool departed(Rank peer) const override { return links_->departed(peer); }
  bool may_spin() const override { return may_spin_; }
  void probe_peers() override { links_->probe(); }
  StallReport stall_report() override { return links_->stall_report(); }

 private:
  struct Attached {
    std::shared_ptr<Memory> memory;
    Bell bell;
  };
  void check_on(Rendezvous& store, Rank peer) const;
  void attach(Rank peer, const std::string& record);
  // What `peer` put into the store; ends early when the group fails meanwhile.
  std::string record_of(Rendezvous& store, const std::string& what, Rank peer,
                        const Deadline& deadline);

  const int owner_pid_;
  const Rank rank_;
  std::shared_ptr<const Bell> bell_;
  std::shared_ptr<ControlPlane> plane_;
  std::shared_ptr<GroupLinks> links_;
  std::vector<Identity> identities_;
  std::vector<Rank> neighbours_;
  std::shared_ptr<Memory> memory_;
  std::map<Rank, Attached> attached_;
  std::map<Rank, std::string> not_mapped_;
  const bool share_memory_;
  bool may_spin_ = false;
};

}  // namespace qcoll::transport
