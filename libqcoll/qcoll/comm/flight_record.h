// What a rank did lately and what it waits for, for people: written as text when a group fails or
// ends, where QCOLL_DUMP names a directory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/operation_log.h"

namespace qcoll::comm {

struct FlightRecord {
  Rank rank = 0;
  int size = 1;
  std::uint64_t group = 0;
  std::string label;  // "rank 2 (host-a, pid 1234)"
  std::string topology;
  std::string failure;                                     // the group's first; empty: it lives
  std::string waits_for;                                   // empty: the data path does not wait
  std::vector<transport::OperationLog::Entry> operations;  // oldest first
  // Sends and receives, which ranks do not make together: numbered by this rank alone.
  std::vector<transport::OperationLog::Entry> messages;
};

const char* name_of(transport::OperationLog::Stage stage);
double unix_seconds(Clock::time_point time);
std::string to_text(const FlightRecord& record);

// Throws UsageError when no file can be made there.
void check_dump_directory(const std::string& directory);
// Replaces DIRECTORY/qcoll_GROUP_rankN.txt. A disk that fills up meanwhile is not an error: the
// group has ended, and its own cause is what matters.
void write_flight_record(const FlightRecord& record, const std::string& directory) noexcept;

}  // namespace qcoll::comm
