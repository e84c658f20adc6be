#include "call/call_plan.h"

#include <unordered_map>
#include <utility>

namespace cutfuse::call {

namespace {

// Guards the table where threads run Python without a lock of the interpreter's; elsewhere that is enough.
class TableLock {
 public:
#ifdef Py_GIL_DISABLED
  TableLock() { PyMutex_Lock(&mutex); }
  ~TableLock() { PyMutex_Unlock(&mutex); }
  static inline PyMutex mutex = {};
#endif
};

}  // namespace

struct PlanTable::State {
  std::unordered_map<CallKey, std::shared_ptr<CallPlan const>, CallKey::Hash> plans;
};

PlanTable::State& PlanTable::state() const {
  static State* const state = new State();  // never freed: plans refer to Python's objects
  return *state;
}

std::shared_ptr<CallPlan const> PlanTable::find(CallKey const& key) const {
  [[maybe_unused]] TableLock const lock;
  auto const found = state().plans.find(key);
  return found == state().plans.end() ? nullptr : found->second;
}

void PlanTable::insert(CallKey const& key, std::shared_ptr<CallPlan const> plan) {
  if (size() >= kLimit) clear();
  [[maybe_unused]] TableLock const lock;
  state().plans.insert_or_assign(key, std::move(plan));
}

void PlanTable::clear() {
  decltype(State::plans) old;
  [[maybe_unused]] TableLock const lock;
  std::swap(old, state().plans);
}

size_t PlanTable::size() const {
  [[maybe_unused]] TableLock const lock;
  return state().plans.size();
}

PlanTable& plan_table() {
  static PlanTable table;
  return table;
}

}  // namespace cutfuse::call
