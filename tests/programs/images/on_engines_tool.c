#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    char at[4096], line[256];
    printf("%s %s %d\n", getcwd(at, sizeof at), getenv("GREETING"), getuid() == 0);
    while (fgets(line, sizeof line, stdin)) fputs(line, stdout);
    FILE *made = fopen(count > 1 ? words[1] : "made", "w");
    if (made) fputs("by the guest", made);
    return made == NULL;
}
