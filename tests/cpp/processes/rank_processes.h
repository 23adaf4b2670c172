// Ranks as processes: forks one for each rank and waits for all of them.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "qcoll/base/types.h"

namespace qcoll::test {

struct Ranks {
  std::string name;  // for messages
  int size = 1;
  std::optional<Rank> victim;  // must end by SIGKILL
  std::function<void(Rank, const std::filesystem::path& folder)> run;
};

// Whether every rank returned from `run` and left with status 0 (what sanitizers find at exit
// makes it another one), and the victim did not. `folder` is new and empty, and removed afterwards.
// What went wrong is on stderr. To be called before this process has made a thread.
bool run_processes(const Ranks& ranks);

}  // namespace qcoll::test
