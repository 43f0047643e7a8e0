/* The first process of a pod: holds the pod's namespaces and does nothing until a signal ends it. */
#include <signal.h>
#include <unistd.h>

static void end(int number) { _exit(number == SIGINT || number == SIGTERM ? 0 : 1); }

int main(void) {
    struct sigaction ends = {.sa_handler = end}, reaps = {.sa_handler = SIG_IGN, .sa_flags = SA_NOCLDWAIT};
    sigaction(SIGINT, &ends, NULL);
    sigaction(SIGTERM, &ends, NULL);
    sigaction(SIGCHLD, &reaps, NULL);
    for (;;) pause();
}
