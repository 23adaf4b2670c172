// The first step of forming a group: every rank tells who and where it is.
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

struct GroupSecret {
  std::uint64_t group = 0;
  wire::Secret secret{};
};
// Rank 0 makes it, the others fetch it.
GroupSecret share_secret(Rendezvous& store, Rank rank, const Deadline& deadline);

// Publishes `mine` and returns all identities, in rank order. Throws TransportError naming ranks
// that do not arrive, and UsageError naming the key, both values and ranks when agreements differ.
std::vector<Identity> roll_call(Rendezvous& store, const Identity& mine, int size,
                                const Deadline& deadline);

// By a rank that cannot take part: the others then fail at once with the reason and the kind of
// error (UsageError if `usage`), not after their timeout.
void refuse_to_join(Rendezvous& store, Rank rank, bool usage, std::string reason);
// Throws what `rank` wrote when it refused, if it did. It must have published its identity.
void check_refusal_of(Rendezvous& store, Rank rank);

}  // namespace qcoll::transport
