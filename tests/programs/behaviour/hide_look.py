import errno, json, os
def met(function, *args):
    try:
        function(*args)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
tree = sorted(os.path.relpath(f"{top}/{name}", "/data") for top, folders, files in os.walk("/data")
              for name in folders + files)
print(json.dumps({
    "tree": tree,
    "read": {name: met(open, f"/data/{name}") for name in (".env", "deep/er/key", "secrets/one", "link", "later")},
    "plain": open("/data/deep/er/plain").read(),
    "write": met(open, "/data/new", "w"),
    "mode": oct(os.stat("/data/deep").st_mode & 0o777),
}))
