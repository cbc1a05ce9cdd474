import os
def number(path):
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)
wanted = number("/tmp/x/p/new") + 1
os.unlink("/tmp/x/p/new")
os.rename("/tmp/x", "/tmp/y")
os.makedirs("/tmp/x/p")
while number("/tmp/x/p/.envrc") < wanted:
    os.unlink("/tmp/x/p/.envrc")
