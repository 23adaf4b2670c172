// One thread per process that accepts connections, lets them prove themselves, and serves the
// control links of all groups. It never touches bulk data.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "qcoll/transport/group_links.h"
#include "qcoll/transport/guest.h"
#include "qcoll/transport/socket.h"

namespace qcoll::transport {

class ControlPlane {
 public:
  // The process's plane; made by the first group, ended with the last. Throws TransportError.
  static std::shared_ptr<ControlPlane> shared();
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  std::uint16_t port() const { return listener_.port; }
  // Where peers may reach this process, best first.
  const std::vector<Address>& addresses() const { return addresses_; }

  void add(std::shared_ptr<GroupLinks> group);
  void remove(const GroupLinks& group);
  void wake() const;  // a group has new links

 private:
  ControlPlane();
  void run();
  void serve();
  void accept_guests();
  bool make_room();  // shows out a guest; false: there is none
  std::shared_ptr<GroupLinks> find(const Hello& hello);
  std::vector<std::shared_ptr<GroupLinks>> groups();

  const int owner_pid_;
  std::vector<Address> addresses_;
  Listener listener_;
  Fd wake_;
  std::mutex mutex_;
  bool stop_ = false;
  std::map<std::pair<std::uint64_t, Rank>, std::shared_ptr<GroupLinks>> groups_;
  const Guest::Find find_ = [this](const Hello& hello) { return find(hello); };
  std::vector<Guest> guests_;
  Clock::time_point accept_again_;  // the listener is left alone until then
  std::atomic<bool> failed_{false};
  std::thread thread_;
};

}  // namespace qcoll::transport
