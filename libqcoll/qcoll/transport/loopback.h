// Ranks as threads of one process, for tests: memory is shared directly, streams are socket pairs.
#pragma once

#include <memory>
#include <vector>

#include "qcoll/transport/mesh.h"

namespace qcoll::transport {

struct LoopbackOptions {
  std::size_t memory_bytes = 0;  // of each rank
  bool map_neighbours = true;    // false: even ranks of one node use streams
  int stream_buffer_bytes = 0;   // of the kernel, to act like a slow wire; 0: its default
};

// One mesh for each rank. node_of[r] says which ranks map each other's memory.
std::vector<std::unique_ptr<Mesh>> make_loopback(const std::vector<int>& node_of,
                                                 const LoopbackOptions& options);

}  // namespace qcoll::transport
