#include "qcoll/base/error.h"

#include <system_error>

namespace qcoll {

std::string system_error_text(const std::string& call, int error_number) {
  return call + ": " + std::generic_category().message(error_number) + " (errno " +
         std::to_string(error_number) + ")";
}

}  // namespace qcoll
