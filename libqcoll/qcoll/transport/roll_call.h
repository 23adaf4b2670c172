// The first step of forming a group: every rank tells who and where it is.
//
// A store may still hold the records of an earlier group (a job that was restarted keeps its
// store). So each rank says hello with a random token, rank 0 publishes a secret together with the
// tokens that it has read, and a rank believes a secret that has its own token. Everything after
// that goes under keys that carry the new group's number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/rendezvous.h"
#include "qcoll/transport/socket.h"
#include "qcoll/wire/mac.h"

namespace qcoll::transport {

struct Identity {
  Rank rank = -1;
  std::string node;     // the label that ranks of one node share
  std::string host;     // host name, for errors
  std::string boot_id;  // ranks of one running kernel share it, whatever their host name
  std::string net_namespace;
  std::string pid_namespace;
  int pid = 0;
  std::uint16_t port = 0;
  std::string addresses;  // comma-separated, best first
  // What all ranks must have equal, as "key=value; key=value": versions and options.
  std::string agreement;

  std::string label() const;  // "rank 2 (host-a, pid 1234)"
};

// This process's identity. `node` empty: the host name and boot id.
Identity own_identity(Rank rank, const std::string& node, std::uint16_t port,
                      const std::vector<Address>& addresses, const std::string& agreement);

// Where `me` dials `other`: loopback inside one network namespace, else its other addresses.
std::vector<Address> addresses_to_dial(const Identity& me, const Identity& other);

// Same kernel and PID namespace: shared memory may work.
bool may_share_memory(const Identity& a, const Identity& b);

// Throws TransportError when `me` can see that `other` has died: as processes of one PID namespace.
void check_alive(const Identity& me, const Identity& other);

struct GroupSecret {
  std::uint64_t group = 0;
  wire::Secret secret{};
  std::vector<wire::Nonce> tokens;  // by rank, as rank 0 has published them
};
// Rank 0 makes it, the others fetch it.
GroupSecret share_secret(Rendezvous& store, Rank rank, int size, const Deadline& deadline);

// The store's key for what `rank` says to its group.
std::string group_key(std::uint64_t group, const std::string& what, Rank rank);

// Publishes `mine` and returns all identities, in rank order. Throws TransportError naming ranks
// that do not arrive, and UsageError naming the key, both values and ranks when agreements differ.
std::vector<Identity> roll_call(Rendezvous& store, const Identity& mine, GroupSecret& secret,
                                const Deadline& deadline);

// By a rank that cannot take part: the others then fail at once with the reason and the kind of
// error (UsageError if `usage`), not after their timeout. They believe it when it has stood for a
// second.
void refuse_to_join(Rendezvous& store, Rank rank, bool usage, std::string reason);
// Throws what `rank` wrote when it refused, if it did. It must have published its identity.
void check_refusal_of(Rendezvous& store, Rank rank);

}  // namespace qcoll::transport
