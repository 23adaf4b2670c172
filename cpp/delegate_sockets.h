// Wakes calls that are stuck in the delegate. gloo has no way to abort them: they wait for peers
// that, having heard of the group's failure, never answer. The end of a connection wakes both ends.
#pragma once

#include <cstdint>
#include <vector>

namespace qcoll::torch_binding {

// TCP ports on which this process listens now, in order.
std::vector<std::uint16_t> listening_ports();
// Shuts down every TCP connection of this process that was accepted on one of `ports`.
void end_connections_accepted_on(const std::vector<std::uint16_t>& ports) noexcept;

}  // namespace qcoll::torch_binding
