"""The process backend: namespaces, seccomp, Landlock and cgroups around ordinary processes."""
