// Tests mistakes with `tessera launch`. Each ends with exit status 2 before any rank starts. The message says what is
// wrong and what helps. Scripts stand in for ssh, mpirun, srun and scontrol.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/version.h"
#include "tests/app/process.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using data::write_file;
using ::testing::HasSubstr;

using Words = std::vector<std::string>;

/// Stands in for `ssh OPTIONS HOST COMMAND`: runs COMMAND on this machine, with a node folder per host. Host "none"
/// does not exist, "late" does not answer, and "old" runs another version of the program.
constexpr const char* kSsh = R"(while [ "${1#-}" != "$1" ]; do shift; done
[ "$1" = none ] && { echo 'ssh: Could not resolve hostname none' >&2; exit 255; }
[ "$1" = late ] && exec sleep 60
command=$(echo "$2" | sed "s|--folder [^ ]*|&-$1|")
[ "$1" = old ] && command=$(echo "$command" | sed 's|^exec [^ ]*|exec FOLDER/other_version|')
eval "$command"
)";
/// Stand-ins for scontrol and srun in an allocation of n1 and n2. The srun starts no program.
constexpr const char* kScontrol = "echo n1; echo n2\n";
constexpr const char* kSrun = R"(case "$*" in
  --mpi=list) echo 'MPI plugin types are... none pmix pmix_v4';;
  *--mpi=pmix*) touch FOLDER/a_rank_was_started;;
  *) echo 'srun: error: Unable to create step' >&2; exit 1;;
esac
)";

struct LaunchMistake {
  const char* name;
  Words options;         // options of `tessera launch`
  Words parts;           // parts of the message
  Words variables = {};  // environment variables; "FOLDER" stands for the test's folder
};

class LaunchMistakes : public ::testing::Test {
 protected:
  LaunchMistakes() {
    make_script("ssh", kSsh);
    make_script("mpirun", "touch FOLDER/a_rank_was_started\n");
    make_script("scontrol", kScontrol);
    make_script("srun", kSrun);
  }

  std::string in_scratch(std::string text) const {
    for (std::size_t at = 0; (at = text.find("FOLDER")) != text.npos;) text.replace(at, 6, scratch_.path().string());
    return text;
  }

  void make_script(const std::string& name, const std::string& text) const {
    app_test::write_script(scratch_ / "bin" / name, in_scratch(text));
  }

  Process start(const Words& options, const Words& variables = {}) const {
    Words launcher = {
        "/usr/bin/env", "-u", "SLURM_JOB_ID", "-u", "SLURM_JOB_NODELIST", in_scratch("PATH=FOLDER/bin:/usr/bin:/bin")};
    for (const std::string& variable : variables) launcher.push_back(in_scratch(variable));
    Words arguments = {"launch", "--address=127.0.0.1", in_scratch("--node-folder=FOLDER/tessera-node")};
    for (const std::string& option : options) arguments.push_back(in_scratch(option));
    for (const char* argument : {"--", "train", "--training.device=cpu", "--job.dump_folder=FOLDER/outputs"}) {
      arguments.push_back(in_scratch(argument));
    }
    return {scratch_, arguments, RLIM_INFINITY, launcher};
  }

  void expect_refused(const std::vector<LaunchMistake>& mistakes) const {
    for (const LaunchMistake& mistake : mistakes) {
      SCOPED_TRACE(mistake.name);
      const Finished finished = start(mistake.options, mistake.variables).finish();
      EXPECT_EQ(finished.status, 2) << finished.output;
      for (const std::string& part : mistake.parts) EXPECT_THAT(finished.output, HasSubstr(part));
      EXPECT_FALSE(fs::exists(scratch_ / "a_rank_was_started"));
      fs::remove_all(scratch_ / "outputs");
    }
  }

  data::TemporaryFolder scratch_;
};

// The launch would delete what others have in that folder.
TEST_F(LaunchMistakes, AFolderOfOthersIsNoNodeFolder) {
  const fs::path folder = scratch_ / "folder";
  fs::create_directory(folder);
  const Finished finished =
      Process(scratch_, {"launch", "--node-folder=" + folder.string(), "--", "train", "--training.device=cpu"})
          .finish();
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output, HasSubstr("--node-folder is '" + folder.string() + "'"));
  EXPECT_THAT(finished.output, HasSubstr("must begin with 'tessera-'"));
  EXPECT_TRUE(fs::exists(folder));
}

TEST_F(LaunchMistakes, WithHostsAreTold) {
  expect_refused({
      {"ssh fails",
       {"--hosts=n1,none"},
       {"not all of 2 nodes are fit, no rank was started", "none: its monitor ended with status 255; try: ssh "}},
      {"a spare fails",
       {"--hosts=n1,n2,none", "--spares=1"},
       {"not all of 3 nodes are fit", "none: its monitor ended with status 255"}},
      {"no ssh", {"--hosts=n1"}, {"cannot start 'ssh'", "install it"}, {"PATH=FOLDER/empty"}},
      {"more nodes than hosts",
       {"--hosts=n1,n2", "--nodes=2", "--spares=1"},
       {"--nodes 2 and --spares 1 need 3 nodes", "the engine hosts has 2", "(--hosts)"}},
      {"a host twice", {"--hosts=n1,n1"}, {"--hosts names 'n1' twice"}},
      {"no such file of hosts", {"--hosts=FOLDER/hosts"}, {"--hosts: there is no file", "a host per line"}},
      {"hosts for Slurm", {"--hosts=n1", "--engine=slurm"}, {"--hosts goes with --engine hosts"}},
      {"no hosts", {"--engine=hosts"}, {"--engine hosts needs --hosts", "n1,n2"}},
      {"nodes without hosts", {"--nodes=2"}, {"--nodes 2", "there is one machine", "give --hosts"}},
      {"too many ranks", {"--hosts=n1,n2", "--ranks-per-node=2000000000"}, {"2 nodes of 2000000000 ranks", "1048576"}},
      {"no timeout", {"--hosts=n1", "--node-timeout=nan"}, {"--node-timeout: nan is not a number"}},
      {"a timeout after which ranks are gone",
       {"--hosts=n1", "--node-timeout=30"},
       {"--node-timeout: 30 is not a number from 0.1 to 8"}},
      {"a starter's option before the command", {"--hosts=n1,n1", "--starter-option=-v"}, {"names 'n1' twice"}},
      {"a factor below 1", {"--hosts=n1", "--slow-factor=0"}, {"--slow-factor: 0 is not a number from 1"}},
  });
}

TEST_F(LaunchMistakes, WithRanksAreTold) {
  const auto message_of = [&](const Words& options, const char* key) {
    Words arguments = {"launch", "--hosts=n1,n2"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), {"--", "train", key, in_scratch("--job.dump_folder=FOLDER/outputs")});
    const Words without_gpu = {"/usr/bin/env", "CUDA_VISIBLE_DEVICES="};
    const Finished finished = Process(scratch_, arguments, RLIM_INFINITY, without_gpu).finish();
    EXPECT_EQ(finished.status, 2) << finished.output;
    return finished.output;
  };
  EXPECT_THAT(message_of({"--ranks-per-node=1"}, "--parallelism.tensor_parallel_degree=4"),
              HasSubstr("--nodes 2 and --ranks-per-node 1 make too few ranks: the mesh needs 4 ranks"));
  // A login node has no GPU, but the nodes may have eight each.
  EXPECT_THAT(message_of({}, "--training.device=auto"), HasSubstr("give --ranks-per-node, or --training.device=cpu"));
}

TEST_F(LaunchMistakes, AnotherVersionOnANodeIsTold) {
  std::string program = read_text_file(TESSERA_BINARY);
  const std::string other = "9" + std::string(version()).substr(1);
  for (std::size_t at = 0; (at = program.find(version(), at)) != program.npos;)
    program.replace(at, other.size(), other);
  fs::permissions(write_file(scratch_ / "other_version", program), fs::perms::owner_all);
  expect_refused(
      {{"another version",
        {"--hosts=n1,old"},
        {"old: it runs Tessera " + other, std::string("this is ") + version(), "install the same program"}}});
}

TEST_F(LaunchMistakes, WithSlurmAreTold) {
  const Words job = {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-2]"};
  expect_refused({
      {"outside of an allocation", {"--engine=slurm"}, {"needs an allocation", "sbatch or salloc", "--hosts"}},
      {"more nodes than the allocation", {"--nodes=3"}, {"need 3 nodes", "the engine slurm has 2", "sbatch -N"}, job},
      {"srun fails", {}, {"n1: its monitor ended with status 1; try: srun ", "no rank was started"}, job},
  });
  make_script("srun", "echo 'MPI plugin types are... none pmi2'\n");
  expect_refused(
      {{"no PMIx", {}, {"srun has no PMIx here", "none pmi2", "install Slurm's PMIx plugin", "--hosts"}, job}});
  make_script("scontrol", "echo 'scontrol: error: Invalid hostlist'; exit 1\n");
  expect_refused({{"scontrol fails", {}, {"'scontrol show hostnames", "failed", "Invalid hostlist"}, job}});
}

TEST_F(LaunchMistakes, TheDoctorTellsOfHostsThatDoNotAnswer) {
  const Words launcher = {"/usr/bin/env", in_scratch("PATH=FOLDER/bin:/usr/bin:/bin")};
  const Finished finished =
      Process(scratch_, {"doctor", "--cluster", "--hosts=none"}, RLIM_INFINITY, launcher).finish();
  EXPECT_EQ(finished.status, 1) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("bad   engine hosts: 0 of 1 nodes answer"));
}

/// Ranks start alone if mpirun is not that of the MPI library that the program was built with.
TEST_F(LaunchMistakes, TheDoctorTellsOfRanksThatDoNotFindEachOther) {
  make_script("mpirun", "while [ \"${1##*/}\" != tessera ]; do shift; done\nfor rank in 1 2; do \"$@\"; done\n");
  const Words launcher = {
      "/usr/bin/env", "-u", "SLURM_JOB_ID", "-u", "SLURM_JOB_NODELIST", in_scratch("PATH=FOLDER/bin:/usr/bin:/bin")};
  const Finished finished =
      Process(scratch_, {"doctor", "--cluster", "--ranks-per-node=2"}, RLIM_INFINITY, launcher).finish();
  EXPECT_EQ(finished.status, 1) << finished.output;
  EXPECT_THAT(finished.output, HasSubstr("bad   2 ranks on 1 nodes did not start"));
  EXPECT_THAT(finished.output, HasSubstr("1 ranks have met\n1 ranks have met"));
}

TEST_F(LaunchMistakes, TheDoctorLeavesNothingInAFolderIfItCannotWriteAnother) {
  fs::create_directories(scratch_ / "shared");
  const Words launcher = {"/usr/bin/env", in_scratch("PATH=FOLDER/bin:/usr/bin:/bin")};
  const Finished finished = Process(scratch_,
                                    {"doctor", "--cluster", "--hosts=none", in_scratch("--folder=FOLDER/shared"),
                                     in_scratch("--folder=FOLDER/nowhere")},
                                    RLIM_INFINITY, launcher)
                                .finish();
  EXPECT_EQ(finished.status, 1);
  EXPECT_THAT(finished.output, HasSubstr("bad   this machine cannot write into the folder '"));
  EXPECT_THAT(finished.output, HasSubstr("nowhere"));
  EXPECT_THAT(finished.output, HasSubstr("0 of 1 nodes answer"));
  EXPECT_TRUE(fs::is_empty(scratch_ / "shared"));
}

TEST_F(LaunchMistakes, TwoLaunchersOfOneRunAreTold) {
  const Process first = start({"--hosts=late"});
  for (int i = 0; i < 1000 && !fs::exists(scratch_ / "outputs" / "launch.json"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  fs::rename(scratch_ / "log.txt", scratch_ / "first_log.txt");  // the second launcher writes log.txt, too
  const Finished second = start({"--hosts=n1"}).finish();
  EXPECT_EQ(second.status, 2) << second.output;
  for (const char* part : {"the run in '", "is in use", "launch of run ", "process "}) {
    EXPECT_THAT(second.output, HasSubstr(part));
  }
  EXPECT_FALSE(fs::exists(scratch_ / "a_rank_was_started"));
  first.send(SIGTERM);
  EXPECT_EQ(first.finish().status, 128 + SIGTERM);
}

}  // namespace
}  // namespace tessera
