// Tests how a process recognises that it is a rank: by variables that launchers set (comm/transport/mpi_transport.h).
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "comm/transport/mpi_transport.h"

namespace tessera {
namespace {

using Variables = std::map<std::string, std::string>;

/// Sets these variables of launchers and unsets all others. Restores the old values at its end.
class Environment {
 public:
  explicit Environment(const Variables& variables) {
    for (const char* name :
         {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_STEP_ID"})
      set(name, std::nullopt);
    for (const auto& [name, value] : variables) set(name, value);
  }
  ~Environment() {
    for (const auto& [name, value] : before_) assign(name, value);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  using Value = std::optional<std::string>;
  static void assign(const std::string& name, const Value& value) {
    value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
  }
  void set(const std::string& name, const Value& value) {
    const char* old = std::getenv(name.c_str());
    before_.emplace(name, old == nullptr ? Value() : Value(old));
    assign(name, value);
  }

  std::map<std::string, Value> before_;
};

bool is_rank(const Variables& variables) {
  const Environment environment(variables);
  return launched_by_mpi();
}

TEST(LaunchedByMpi, MpirunAndSrun) {
  EXPECT_TRUE(is_rank({{"OMPI_COMM_WORLD_SIZE", "4"}, {"PMIX_RANK", "1"}}));
  EXPECT_TRUE(is_rank({{"PMIX_RANK", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}}));  // srun --mpi=pmix
  EXPECT_TRUE(is_rank({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"SLURM_STEP_ID", "0"}}));       // srun --mpi=pmi2
}

TEST(LaunchedByMpi, TheLauncherSaysWhichAndHowMany) {
  const auto told = [](const Variables& variables) {
    const Environment environment(variables);
    return std::pair(launched_rank(), launched_size());
  };
  using Told = std::pair<std::optional<int>, std::optional<int>>;
  EXPECT_EQ(told({}), (Told{}));
  EXPECT_EQ(told({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}), (Told{1, 4}));
  // A run within an allocation has the outer step's variables, too.
  EXPECT_EQ(told({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}),
            (Told{0, 2}));
  EXPECT_EQ(told({{"PMIX_RANK", "3"}}), (Told{3, std::nullopt}));
  EXPECT_EQ(told({{"PMI_RANK", "x"}}), (Told{}));
}

TEST(LaunchedByMpi, ShellsAreNoRanks) {
  EXPECT_FALSE(is_rank({}));
  const Variables allocation = {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_MPI_TYPE", "pmix"}};
  EXPECT_FALSE(is_rank(allocation));
  Variables batch = allocation;  // the script of a batch job
  batch["SLURM_PROCID"] = "0";
  EXPECT_FALSE(is_rank(batch));
  Variables interactive = batch;  // a shell of salloc with use_interactive_step
  interactive["SLURM_STEP_ID"] = "4294967290";
  interactive["PMIX_RANK"] = "0";
  EXPECT_FALSE(is_rank(interactive));
  interactive["OMPI_COMM_WORLD_SIZE"] = "4";  // a rank of mpirun in that shell
  EXPECT_TRUE(is_rank(interactive));
}

}  // namespace
}  // namespace tessera
