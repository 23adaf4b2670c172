// A connection that has not proven itself yet: hello, challenge, proof, and the TLS handshake where
// the group encrypts. Costs a stranger's bounded bytes, and never blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "qcoll/base/fd.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/group_links.h"
#include "qcoll/transport/handshake.h"
#include "qcoll/transport/tls.h"

namespace qcoll::transport {

class Guest {
 public:
  // The group that a hello is for; null: there is none.
  using Find = std::function<std::shared_ptr<GroupLinks>(const Hello&)>;

  Guest(Fd fd, Clock::time_point until) : fd_(std::move(fd)), until_(until) {}

  // Takes what has come. False: done with it, handed to its group or not.
  bool hear(const Find& find);
  bool named() const { return hello_.has_value(); }  // sent a hello for a group of this process
  bool overdue(Clock::time_point now) const { return now > until_; }
  int fd() const { return fd_.get(); }
  std::size_t kept_bytes() const { return received_.size(); }

 private:
  bool listen(const Find& find);  // to hello and proof
  bool challenge(const Find& find);
  bool check_proof(const Find& find);
  bool shake(const Find& find);
  bool admit(GroupLinks& group);

  Fd fd_;
  Clock::time_point until_;
  std::vector<std::byte> received_;
  std::optional<Hello> hello_;
  wire::Nonce nonce_{};
  std::unique_ptr<Tls> tls_;
};

}  // namespace qcoll::transport
