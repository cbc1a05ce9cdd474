import os, sys
from ringfence.host.cgroups import base as cgroup_base; from ringfence.host import process_id as owners, state
place = sys.argv[1]
os.umask(0o777)
state.state_dir = lambda: state._own(place)
owner = state.register()
owner.note("file", path=place + "/none", device=1, inode=1)
group = place + "/group"
cgroup_base.make(group)
def modes(): return [oct(os.stat(path).st_mode & 0o777) for path in (place, state.record(), group)]
print(*modes(), cgroup_base.names(group), len(state._read_record(state.record())))
os.chmod(group, 0)
print(cgroup_base.names(group))  # as an earlier version left it: the sweep goes on, and can remove it
os.rmdir(group)
