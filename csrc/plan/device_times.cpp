#include "plan/device_times.h"

#include <algorithm>
#include <stdexcept>

namespace cutfuse {

namespace {

#define CUTFUSE_DEVICE(...)
#define CUTFUSE_TIME(number, value) value,
constexpr double kValues[] = {
#include "plan/devices/h200.def"
};
#undef CUTFUSE_TIME
static_assert(sizeof(kValues) == sizeof(DeviceNumbers), "the first device's table has a row for each number");

// Calls visit with the name of each number and the number.
template <class Visit>
void visit_numbers(DeviceNumbers& numbers, Visit const& visit) {
#define CUTFUSE_TIME(number, value) visit(#number, numbers.number);
#include "plan/devices/h200.def"
#undef CUTFUSE_TIME
}
#undef CUTFUSE_DEVICE

#define CUTFUSE_DEVICE(device, multiprocessors_, bandwidth) \
  times.name = device;                                      \
  times.multiprocessors = multiprocessors_;                 \
  times.gigabytes_per_second = bandwidth;
#define CUTFUSE_TIME(number, value) times.numbers.number = value;

DeviceTimes h200_times() {
  DeviceTimes times = {};
#include "plan/devices/h200.def"
  return times;
}

#undef CUTFUSE_DEVICE
#undef CUTFUSE_TIME

}  // namespace

std::vector<DeviceTimes> const& device_times() {
  static std::vector<DeviceTimes> const all = {h200_times()};
  return all;
}

DeviceTimes const& times_of(std::string const& device) {
  auto const& all = device_times();
  auto const found =
      std::find_if(all.begin(), all.end(), [&](DeviceTimes const& times) { return times.name == device; });
  if (found == all.end()) throw std::invalid_argument("there is no table of times of " + device);
  return *found;
}

std::map<std::string, double> named_numbers(DeviceNumbers const& numbers) {
  std::map<std::string, double> named;
  DeviceNumbers copied = numbers;
  visit_numbers(copied, [&](char const* name, double number) { named[name] = number; });
  return named;
}

DeviceTimes with_numbers(DeviceTimes times, std::map<std::string, double> const& numbers) {
  size_t used = 0;
  visit_numbers(times.numbers, [&](char const* name, double& number) {
    auto const found = numbers.find(name);
    if (found == numbers.end()) return;
    number = found->second;
    ++used;
  });
  if (used != numbers.size()) throw std::invalid_argument("a number has a name that no row of the table has");
  return times;
}

}  // namespace cutfuse
