#include "qcoll/comm/flight_record.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "qcoll/base/error.h"

namespace qcoll::comm {
namespace {

using transport::OperationLog;
using Stage = OperationLog::Stage;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// "20:15:02.123456", UTC: ranks on several hosts can be laid side by side.
std::string time_of_day(Clock::time_point time) {
  const auto since_epoch = std::chrono::microseconds(std::llround(unix_seconds(time) * 1e6));
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
  const std::time_t stamp = whole.count();
  std::tm parts{};
  ::gmtime_r(&stamp, &parts);
  char text[32];
  std::snprintf(text, sizeof(text), "%02d:%02d:%02d.%06d", parts.tm_hour, parts.tm_min,
                parts.tm_sec, static_cast<int>((since_epoch - whole).count()));
  return text;
}

std::string line_of(const OperationLog::Entry& entry) {
  const auto now = Clock::now();
  const bool begun = entry.stage != Stage::kQueued;
  const bool ended = entry.stage == Stage::kFinished || entry.stage == Stage::kFailed;
  char line[96];
  std::snprintf(line, sizeof(line), "%8llu  %s  %10.6f  %10.6f  %-8s  ",
                static_cast<unsigned long long>(entry.sequence), time_of_day(entry.queued).c_str(),
                seconds_between(entry.queued, begun ? entry.started : now),
                begun ? seconds_between(entry.started, ended ? entry.ended : now) : 0.0,
                name_of(entry.stage));
  return line + entry.text + "\n";
}

}  // namespace

const char* name_of(Stage stage) {
  switch (stage) {
    case Stage::kQueued:
      return "queued";
    case Stage::kRunning:
      return "running";
    case Stage::kFinished:
      return "finished";
    case Stage::kFailed:
      return "failed";
  }
  return "";
}

double unix_seconds(Clock::time_point time) {
  const auto ago = Clock::now() - time;
  const auto then = std::chrono::system_clock::now() -
                    std::chrono::duration_cast<std::chrono::system_clock::duration>(ago);
  return std::chrono::duration<double>(then.time_since_epoch()).count();
}

std::string to_text(const FlightRecord& record) {
  std::ostringstream text;
  text << record.label << " of " << record.size << ", " << record.topology << "\n"
       << "failure:   " << (record.failure.empty() ? "none" : record.failure) << "\n"
       << "waits for: " << (record.waits_for.empty() ? "nobody" : record.waits_for) << "\n\n"
       << "  number  queued (UTC)      waited (s)     ran (s)  state     call\n";
  for (const OperationLog::Entry& entry : record.operations) text << line_of(entry);
  if (!record.messages.empty()) text << "\nsends and receives, numbered by this rank alone\n";
  for (const OperationLog::Entry& entry : record.messages) text << line_of(entry);
  return text.str();
}

void check_dump_directory(const std::string& directory) {
  if (std::filesystem::is_directory(directory) && ::access(directory.c_str(), W_OK | X_OK) == 0)
    return;
  throw UsageError("QCOLL_DUMP=\"" + directory +
                   "\" is not a directory that this process may write to; make it first");
}

void write_flight_record(const FlightRecord& record, const std::string& directory) noexcept {
  try {
    char name[64];
    std::snprintf(name, sizeof(name), "qcoll_%016llx_rank%d.txt",
                  static_cast<unsigned long long>(record.group), record.rank);
    const std::filesystem::path path = std::filesystem::path(directory) / name;
    const std::filesystem::path partial = path.string() + ".partial";
    {
      std::ofstream file(partial);
      file << to_text(record);
    }
    std::filesystem::rename(partial, path);
  } catch (...) {
    return;
  }
}

}  // namespace qcoll::comm
